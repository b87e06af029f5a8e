"""Process groups as tide sees them: finding the tide backend of a group, its inner backends, and
making child groups."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist

from tide import _C, settings


def of(
    group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu"
) -> _C.Backend | None:
    """The tide backend that serves `device` in `group` (the default group without one); None where
    another does."""
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError("no process group: call torch.distributed.init_process_group first")
    try:
        backend: Any = group._get_backend(torch.device(device))
    except RuntimeError:
        return None
    while not isinstance(backend, _C.Backend):
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps backends.
        backend = getattr(backend, "wrapped_pg", None)
        if backend is None:
            return None
    return backend


def inner(group: dist.ProcessGroup | None = None, device: torch.device | str = "cpu") -> Any:
    """The inner c10d backend that serves `device` in a tide group, made now if need be (all ranks
    must call it then).

    Raises ValueError when `device` is not tide's in this group.
    """
    backend = of(group, device)
    if backend is None:
        raise ValueError(
            f"{torch.device(device).type} tensors of this group are not served by tide"
        )
    return backend.inner("cpu" if torch.device(device).type == "cpu" else "cuda")


def start(backend: _C.Backend) -> None:
    """First steps of a new group: its inner CPU backend, and the FSDP2 seam with the process's
    first group."""
    # At creation all ranks are here. At the first CPU operation they need not be: it may be a send
    # between two.
    backend.inner("cpu")
    import_module("tide.dumps").follow(backend)
    if backend.options.fsdp == "0":
        return
    try:
        import_module("tide.fsdp").install()
    except ImportError as error:
        warnings.warn(f"tide leaves FSDP2 to its stock communication: {error}", stacklevel=2)


def fresh_store(store: dist.Store, rank: int, size: int, global_ranks: Sequence[int]) -> dist.Store:
    """The part of a group's store that this life of the group has for itself.

    A group that is destroyed and made again meets the keys of its former life. Every member counts
    its lives by itself; members of equal groups count equally, so they agree without a message.
    """
    members = hashlib.sha1(repr([size, *global_ranks]).encode()).hexdigest()[:16]
    life = store.add(f"tide/{members}/lives/{rank}", 1)
    return dist.PrefixStore(f"tide/{members}/{life}/", store)


def create_child(store: dist.Store, rank: int, size: int, given: Any) -> _C.Backend:
    """The backend of a group that c10d splits off a tide group."""
    from tide.inner_backends import inner_factory
    from tide.options import completed

    options = completed(given if isinstance(given, _C.Options) else None, given._timeout)
    options.group_name = given.group_name
    options.global_ranks_in_group = list(given.global_ranks_in_group)
    store = fresh_store(store, rank, size, options.global_ranks_in_group)
    settings.agree(store, rank, size, options)
    backend = _C.Backend(
        store, rank, size, options, inner_factory(store, rank, size, options), create_child
    )
    start(backend)
    return backend
