"""What tide knows about one FSDP2 parameter group; it hangs on the group as `_tide_record`.

One record per group and process. Everything in it follows from the vote and from the order of
calls, so it is equal on all ranks of the group's process group. Calls on a record come from the
thread that runs the module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tide import _C
    from tide.fsdp.gather import GatherResult

ATTRIBUTE = "_tide_record"
IN_PLACE = "in_place"  # gradients are read where autograd left them
SLOT_REUSE = "slot_reuse"  # gradients are moved into the slot that their group has just vacated


@dataclass(frozen=True)
class ParameterFacts:
    """One parameter as it was planned. Numbers of elements; `rows` runs of a shard in the unsharded
    parameter."""

    name: str
    dtype: torch.dtype
    shard_dtype: torch.dtype
    shard_numel: int
    unsharded_numel: int
    rows: int


@dataclass(eq=False)
class GroupRecord:
    name: str
    ranks: int = 1
    process_group: str = ""
    parameters: tuple[ParameterFacts, ...] = ()
    index_of: dict[int, int] = field(default_factory=dict)  # id(FSDPParam) -> index of the plan
    reason: str = ""  # why the group, or one of its directions, goes stock
    memory: str = ""  # IN_PLACE or SLOT_REUSE
    reshards_after_forward: bool = True
    has_own_slot: bool = False  # it stays unsharded between forward and backward, or after backward
    gradient_dtype: torch.dtype = torch.float32
    trainable_parameters: tuple[bool, ...] = ()

    gather_backend: _C.Backend | None = None  # None: gathers go stock
    gather_group: dist.ProcessGroup | None = None
    gather_plan: int = -1
    reduce_backend: _C.Backend | None = None  # None: reductions go stock
    reduce_group: dist.ProcessGroup | None = None
    reduce_plan: int = -1
    staging: str = "none"
    slot_bytes: int = 0

    holds_slot: bool = False
    pending: GatherResult | None = None  # started and not yet waited for

    gathers: int = 0
    reduces: int = 0
    # Reason -> calls of this group that went stock for it.
    stock_calls: Counter[str] = field(default_factory=Counter)

    @cached_property
    def unsharded_bytes(self) -> int:
        """Of the parameters themselves, without padding."""
        return sum(p.unsharded_numel * p.dtype.itemsize for p in self.parameters)

    @cached_property
    def gradient_bytes(self) -> int:
        """Of all gradients, without padding, in the dtype that autograd leaves (the unsharded
        parameters')."""
        return sum(
            p.unsharded_numel * p.dtype.itemsize
            for p, trainable in zip(self.parameters, self.trainable_parameters, strict=True)
            if trainable
        )

    @property
    def trainable(self) -> bool:
        return any(self.trainable_parameters)

    def forget_at_end(self, backend: _C.Backend, plan: int) -> None:
        """The backend forgets `plan` when this record is gone, and its group with it."""
        weakref.finalize(self, _forget, weakref.ref(backend), plan).atexit = False

    def vacate(self) -> None:
        """The slot is free from here in call order. Its storages must have been released."""
        if not self.holds_slot or self.gather_backend is None:
            return
        self.holds_slot = False
        # A group that failed or was destroyed has no ring to give the slot back to; its next call
        # says why.
        with contextlib.suppress(dist.DistBackendError):
            self.gather_backend.vacate(self.gather_plan)


def _forget(backend: weakref.ref[_C.Backend], plan: int) -> None:
    alive = backend()
    if alive is not None:
        alive.forget(plan)


def record_of(group: Any) -> GroupRecord | None:
    """The record of an FSDPParamGroup; None before its root was planned."""
    record = vars(group).get(ATTRIBUTE)
    return record if isinstance(record, GroupRecord) else None
