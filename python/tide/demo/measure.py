"""Measures one FSDP2 step from outside, in the same way for every backend."""

import time
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

LAYOUT_COPIES = ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in")
"""What stock FSDP2 calls its copies between the collective's order and the parameters' (any prefix or suffix)."""


class CommunicationClock:
    """While entered, adds up the time that this process spends inside FSDP2's own communication calls.

    `seconds` counts unshard, waiting for it, and post-backward (copies, reduce, waits, freeing) once, however they
    nest. `gathers` and `reduces` count the calls that found something to do, by group. Not for use by two threads.
    """

    METHODS = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.gathers: Counter[Any] = Counter()
        self.reduces: Counter[Any] = Counter()
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
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, original in self._originals.items():
            setattr(FSDPParamGroup, name, original)
        self._originals = {}

    def take(self) -> float:
        """The seconds since the last call of this method."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def _timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def method(group: Any, *arguments: Any, **named: Any) -> Any:
            sharded = name == "unshard" and not group.is_unsharded and group._all_gather_result is None
            self._depth += 1
            start = time.perf_counter()
            try:
                return original(group, *arguments, **named)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - start
                if sharded and group._all_gather_result is not None:
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


def least_bytes(group: Any, world: int, communication: torch.dtype, gradient: torch.dtype) -> tuple[int, int]:
    """(gather, reduce): the bytes that one rank must write into others' memory for one call of each.

    Gather: its padded shard of every parameter to world - 1 ranks. Reduce: world - 1 slices of every gradient, in the
    dtype that autograd left; the sum's fp32 never travels.
    """
    numel = 0
    for parameter in group.fsdp_params:
        rows = parameter._orig_size[0]
        numel += -(-rows // world) * (parameter._orig_size.numel() // max(rows, 1))
    return numel * communication.itemsize * (world - 1), numel * gradient.itemsize * (world - 1)


def layout_copies(step: Callable[[], None]) -> tuple[dict[str, int], float]:
    """Runs `step` under torch's profiler. Returns calls by kind of layout copy, and their milliseconds together."""
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


def counters() -> dict[str, int]:
    """tide's own counters of the default group for CPU tensors; empty on another backend."""
    group = dist.distributed_c10d._get_default_group()
    backend = group._get_backend(torch.device("cpu"))
    read = getattr(backend, "counters", None)
    return dict(read()) if read is not None else {}


def written_bytes(before: dict[str, int], after: dict[str, int]) -> int:
    """Bytes that this rank's gathers and reduces wrote into other ranks' memory between two readings of `counters`."""
    names = ("gather_pushed_bytes", "reduce_pushed_bytes")
    return sum(after.get(name, 0) - before.get(name, 0) for name in names)
