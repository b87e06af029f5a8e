"""Makes the inner backends of a tide group: c10d's own, by their registered creators."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

if TYPE_CHECKING:
    from tide import _C

_GRACE = timedelta(seconds=10)
"""Added to inner timeouts, so that tide's own message comes first when a wait of both has the same
cause."""


def inner_factory(
    store: dist.Store, rank: int, size: int, options: _C.Options, split_from: Any = None
) -> Callable[[str], Any]:
    """The callable that a tide backend asks for its inner backend, once per device type ("cpu",
    "cuda").

    Each inner backend meets its peers under a prefix of its own in the group's store. Raises
    RuntimeError when c10d does not know the chosen name, and what the inner backend's creator
    raises.
    """

    def make(device_type: str) -> Any:
        name = options.inner_cpu if device_type == "cpu" else options.inner_cuda
        if name == "tide":
            raise RuntimeError("the inner backend of a tide group cannot be tide itself")
        inner_store = dist.PrefixStore(f"tide_{device_type}/", store)
        request = distributed_c10d._DistributedBackendOptions()
        request.store = inner_store
        request.group_rank = rank
        request.group_size = size
        request.timeout = options._timeout + _GRACE
        request.group_id = options.group_name
        request.global_ranks_in_group = list(options.global_ranks_in_group)
        if name not in ("nccl", "nccl-legacy") or hasattr(split_from, "inner"):
            return _create(name, request, None)
        return _create(name, request, split_from)

    return make


def _create(name: str, request: Any, split_from: Any) -> Any:
    """`split_from`: the NCCL backend whose communicator the new one's is split off, if any."""
    if split_from is not None and hasattr(request, "split_from"):  # torch 2.11 has no such field
        request.split_from = split_from
    backend_class = distributed_c10d.Backend
    ensure = getattr(backend_class, "_ensure_backend_registered", None)
    if ensure is not None:
        ensure(name)
    plugin = backend_class._plugins.get(name.upper())
    if plugin is not None:
        if plugin.extended_api:
            return plugin.creator_fn(request, None)
        return plugin.creator_fn(
            request.store, request.group_rank, request.group_size, request.timeout
        )
    if name == "gloo":
        return distributed_c10d.ProcessGroupGloo(
            request.store, request.group_rank, request.group_size, timeout=request.timeout
        )
    if name == "nccl":
        nccl = distributed_c10d.ProcessGroupNCCL
        nccl_options = nccl.Options()
        nccl_options._timeout = request.timeout
        nccl_options.global_ranks_in_group = request.global_ranks_in_group
        nccl_options.group_name = request.group_id
        if split_from is not None:
            nccl_options.split_from = split_from
            nccl_options.split_color = distributed_c10d._process_group_color(
                request.global_ranks_in_group
            )
        return nccl(request.store, request.group_rank, request.group_size, nccl_options)
    raise RuntimeError(f"c10d knows no backend {name!r} that could be an inner backend of tide")
