"""Measures one FSDP2 step from outside, in the same way for every backend."""

import os
import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own chatter

LAYOUT_COPIES = ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in")
"""What stock FSDP2 calls its copies between the collective's order and the parameters' (any prefix
or suffix)."""


class CommunicationClock:
    """While entered, adds up the time that this process spends inside FSDP2's own communication
    calls.

    Gathering is unshard and waiting for it, reducing is post-backward (copies, sums, waits,
    freeing) and what the end of backward waits for; nested calls count once, for the outermost.
    `gathers` and `reduces` count the calls that found something to do, by group. Not for use by two
    threads.
    """

    METHODS: ClassVar = {
        "unshard": "gather",
        "wait_for_unshard": "gather",
        "post_backward": "reduce",
        "finalize_backward": "reduce",
    }

    def __init__(self) -> None:
        self.gathers: Counter[Any] = Counter()
        self.reduces: Counter[Any] = Counter()
        self._seconds = {"gather": 0.0, "reduce": 0.0}
        self._depth = 0
        self._originals: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> "CommunicationClock":
        for name in self.METHODS:
            original = getattr(FSDPParamGroup, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(FSDPParamGroup, name, self._timed(name, original))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, original in self._originals.items():
            setattr(FSDPParamGroup, name, original)
        self._originals = {}

    def take(self) -> tuple[float, float]:
        """(gather, reduce): the seconds since the last call of this method."""
        taken = (self._seconds["gather"], self._seconds["reduce"])
        self._seconds = {"gather": 0.0, "reduce": 0.0}
        return taken

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: Any, *arguments: Any, **named: Any) -> Any:
            waiting = group._all_gather_result is not None
            self._depth += 1
            start = time.perf_counter()
            try:
                return original(group, *arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self._seconds[self.METHODS[name]] += time.perf_counter() - start
                if name == "unshard" and not waiting and group._all_gather_result is not None:
                    self.gathers[group] += 1
                if name == "post_backward":
                    self.reduces[group] += 1

        return method


def groups_of(model: nn.Module) -> list[Any]:
    """The model's FSDP2 groups in module order."""
    found: list[Any] = []
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is None:
            continue
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        found.extend(groups)
    return found


def least_bytes(
    group: Any, rank: int, world: int, communication: torch.dtype, gradient: torch.dtype
) -> tuple[int, int]:
    """(gather, reduce): the bytes that `rank` must write into others' memory for one call of each.

    Gather: its rows of every parameter to world - 1 ranks. Reduce: every other rank's rows of every
    gradient, in the dtype that autograd left. Padding and the sum's fp32 need not travel.
    """
    own = others = 0
    for parameter in group.fsdp_params:
        size = parameter._orig_size
        rows = size[0]
        columns = size.numel() // max(rows, 1)
        shard = -(-rows // world)
        mine = max(0, min(rows - rank * shard, shard))
        own += mine * columns
        others += (rows - mine) * columns
    return own * communication.itemsize * (world - 1), others * gradient.itemsize


def layout_copies(step: Callable[[], object]) -> tuple[dict[str, int], float]:
    """Runs `step` under torch's profiler. Returns calls by kind of layout copy, and their
    milliseconds together."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profile:
        step()
    calls = dict.fromkeys(LAYOUT_COPIES, 0)
    microseconds = 0.0
    for event in profile.key_averages():
        kind = next((copy for copy in LAYOUT_COPIES if copy in event.key), None)
        # aten's and fsdp's operators of one name nest; FSDP2 calls the fsdp ones.
        if kind is not None and event.key.startswith("fsdp::"):
            calls[kind] += event.count
            microseconds += event.cpu_time_total
    return calls, microseconds / 1000


def counters(group: dist.ProcessGroup | None = None) -> dict[str, int]:
    """tide's own counters of `group` (the default group if None) for CPU tensors; empty on another
    backend."""
    group = group or dist.group.WORLD
    assert group is not None
    read = getattr(group._get_backend(torch.device("cpu")), "counters", None)
    return dict(read()) if read is not None else {}


def written_bytes(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes that this rank wrote into other ranks' memory, on its node and on others, between two
    readings of `counters`."""
    names = ("bytes_pushed", "bytes_sent")
    return sum(after.get(name, 0) - before.get(name, 0) for name in names)
