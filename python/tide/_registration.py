"""How torch.distributed finds tide: the two entry points, and the creator that c10d calls for each
new group."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_DEVICES = ["cpu", "cuda"]


def register() -> None:
    """Entry point of torch 2.14 and newer: c10d calls it at the first use of the name "tide".

    Raises ImportError, with the command that rebuilds, when tide was built for another minor
    version of torch.
    """
    _check_torch_version()
    from torch.distributed import distributed_c10d

    if "TIDE" not in distributed_c10d.Backend._plugins:
        distributed_c10d.Backend.register_backend(
            "tide", create_backend, extended_api=True, devices=list(_DEVICES)
        )


def autoload() -> None:
    """Entry point of torch 2.13 and older, which load it at `import torch`. Newer ones call
    register() by themselves."""
    import torch

    if _minor(torch.__version__) < 14:
        try:
            register()
        except ImportError as error:
            # `import torch` must go on for programs that do not use tide.
            import warnings

            warnings.warn(str(error), stacklevel=2)


def create_backend(opts: Any, backend_options: object | None) -> Any:
    """What c10d calls for each group: `opts` is c10d's DistributedBackendOptions.

    Raises ValueError where the group has another custom backend already (cpu:other,cuda:tide): c10d
    keeps one of them for both devices, and says nothing.
    """
    from tide import _C, groups, options, settings
    from tide.inner_backends import inner_factory

    if _has_custom_backend(getattr(opts, "process_group", None)):
        raise ValueError(
            f"tide cannot serve one device of group '{opts.group_id}' beside another custom "
            "backend: c10d would give both devices the other one; name tide for both, or a "
            "built-in backend (gloo, nccl) for the other device"
        )
    completed = options.completed(backend_options, opts.timeout)
    completed.group_name = opts.group_id
    completed.global_ranks_in_group = list(opts.global_ranks_in_group)
    rank, size = opts.group_rank, opts.group_size
    store = groups.fresh_store(opts.store, rank, size, completed.global_ranks_in_group)
    settings.agree(store, rank, size, completed)
    make_inner = inner_factory(store, rank, size, completed, getattr(opts, "split_from", None))
    backend = _C.Backend(store, rank, size, completed, make_inner, groups.create_child)
    groups.start(backend)
    return backend


def _has_custom_backend(process_group: Any) -> bool:
    from torch.distributed import ProcessGroup

    try:
        return bool(process_group._backend_id(ProcessGroup.BackendType.CUSTOM))
    except (AttributeError, RuntimeError):  # an older torch; no such backend yet
        return False


def _minor(version: str) -> int:
    return int(version.split(".")[1])


def _check_torch_version() -> None:
    import torch

    note_path = Path(__file__).with_name("_built_for.json")
    if not note_path.is_file():
        raise ImportError(
            "tide's extension is not built; build it with `pip install .` in tide's source folder"
        )
    note = json.loads(note_path.read_text())
    built = ".".join(note["torch"].split(".")[:2])
    present = ".".join(torch.__version__.split(".")[:2])
    if built != present:
        raise ImportError(
            f"tide was built for torch {built} and meets torch {present}. Rebuild it: "
            f"pip install --force-reinstall --no-deps {note['source']}"
        )
