"""Where the seam meets the compiled module: the tide backend behind a process group, and its settings."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tide.fsdp.record import IN_PLACE, SLOT_REUSE, Arena

if TYPE_CHECKING:
    from tide import _C


@dataclass(frozen=True)
class Settings:
    gathers: bool
    reduces: bool
    memory: str


def compiled() -> Any:
    """The module tide._C; imported late, as `import tide` must work where it was not built."""
    from tide import _C

    return _C


def find(group: dist.ProcessGroup, device: torch.device) -> _C.Backend | None:
    """The tide backend that serves `device` in this process group; None when another backend does."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # the group has no backend for this device
        return None
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
    return backend if isinstance(backend, compiled().Backend) else None


def settings(backend: _C.Backend) -> Settings:
    """TIDE_FSDP and TIDE_MEMORY, or the options that the process group was made with."""
    directions = os.environ.get("TIDE_FSDP", "both")
    memory = os.environ.get("TIDE_MEMORY", IN_PLACE)
    return Settings(
        gathers=directions in ("both", "gather"),
        reduces=directions in ("both", "reduce"),
        memory=SLOT_REUSE if memory == SLOT_REUSE else IN_PLACE,
    )


_arenas: WeakKeyDictionary[Any, Arena] = WeakKeyDictionary()


def arena_of(backend: _C.Backend) -> Arena:
    """The one record of call order for this backend."""
    return _arenas.setdefault(backend, Arena())
