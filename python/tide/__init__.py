"""tide: layout-aware collectives for FSDP2, as the torch.distributed backend "tide".

Training scripts need no import: ``torch.distributed.init_process_group("tide")`` finds the backend
by itself. What is exported here is for those who want more: options, the inner backends, tensors
and lists that gathers write straight.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide._C import Options
    from tide.fsdp.report import report
    from tide.groups import inner, of
    from tide.lists import GroupLayout, empty, register

__version__ = "0.1.0"

_HOMES = {
    "Options": "tide.options",
    "inner": "tide.groups",
    "of": "tide.groups",
    "GroupLayout": "tide.lists",
    "empty": "tide.lists",
    "register": "tide.lists",
    "report": "tide.fsdp.report",
}

__all__ = ["GroupLayout", "Options", "empty", "inner", "of", "register", "report"]


def __getattr__(name: str) -> Any:
    # Resolved on first use: torch may import this package while torch itself is still being
    # imported.
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'tide' has no attribute {name!r}")
    return getattr(import_module(home), name)
