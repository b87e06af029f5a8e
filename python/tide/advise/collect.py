"""One pass over a trace: keeps a few numbers of the events that matter, forgets the rest.

A kernel with its launch takes about 60 bytes; what is no kernel takes none, whatever its size.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any

from tide.advise.stream import Event, Trace
from tide.look import BadInput

COMMUNICATION = ("nccl", "rccl", "nvshmem", "mscclpp", "oneccl")
COLLECTIVES = (
    ("gather", ("allgather", "all_gather")),
    ("reduce", ("reducescatter", "reduce_scatter")),
    ("all-reduce", ("allreduce", "all_reduce")),
    ("all-to-all", ("alltoall", "all_to_all")),
    ("send and receive", ("sendrecv", "send", "recv")),
    ("broadcast", ("broadcast",)),
)
COMPUTE, OTHER_COLLECTIVE = "compute", "other collective"
COPIES = {
    "fsdp::all_gather_copy_in": "copy in",
    "fsdp::split_with_sizes_copy": "copy out",
    "fsdp::_split_with_sizes_copy_with_prefixes_": "copy out",
    "fsdp::chunk_cat": "chunk_cat",
    "fsdp::chunk_cat_mixed_dtype": "chunk_cat",
    "fsdp::_chunk_cat_with_prefixes_": "chunk_cat",
    "aten::_chunk_cat": "chunk_cat",
}
COPY_KINDS = ("copy in", "copy out", "chunk_cat")
COPY_KERNELS = (("split_with_sizes_copy", "copy out"), ("chunk_cat", "chunk_cat"))
FSDP = "FSDP::"
FSDP1 = "FullyShardedDataParallel."


@dataclass
class Table:
    """Columns of equal length: begin, end (microseconds), a name's index, and what a user adds."""

    names: list[str] = field(default_factory=list)
    begin: array[float] = field(default_factory=lambda: array("d"))
    end: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("H"))
    more: dict[str, array[Any]] = field(default_factory=dict)
    _index: dict[str, int] = field(default_factory=dict)

    def add(self, event: Event, name: str, **more: float) -> None:
        self.begin.append(event["ts"])
        self.end.append(event["ts"] + event["dur"])
        if name not in self._index and len(self.names) < 65535:
            self._index[name] = len(self.names)
            self.names.append(name)
        self.name.append(self._index.get(name, 0))
        for column, value in more.items():
            self.more.setdefault(column, array("d")).append(value)

    def __len__(self) -> int:
        return len(self.begin)


@dataclass
class Launches:
    """Columns of equal length: what a launch has in common with its kernel, when, on which
    thread."""

    correlation: array[int] = field(default_factory=lambda: array("q"))
    time: array[float] = field(default_factory=lambda: array("d"))
    thread: array[float] = field(default_factory=lambda: array("d"))

    def add(self, correlation: int, event: Event) -> None:
        self.correlation.append(correlation)
        self.time.append(event["ts"])
        self.thread.append(thread(event))


@dataclass
class Collected:
    """Of one rank."""

    path: str
    rank: int | None = None
    ranks: int | None = None
    backend: str = ""
    sms: int = 0
    device: str = ""
    kernels: Table = field(default_factory=Table)
    launches: Launches = field(default_factory=Launches)
    copies: Table = field(default_factory=Table)  # CPU operations
    ranges: Table = field(default_factory=Table)  # FSDP2's annotations
    waits: Table = field(default_factory=Table)  # collectives of CPU backends
    steps: dict[str, tuple[float, float]] = field(default_factory=dict)
    first: float = float("inf")
    last: float = float("-inf")
    fsdp1: int = 0
    tide: int = 0
    events: int = 0
    timed: int = 0
    truncated: bool = False
    broken: int = 0


def collect(trace: Trace) -> Collected:
    found = Collected(str(trace.path))
    for event in trace.events():
        found.events += 1
        if event.get("ph") == "X" and regular(event):
            found.timed += 1
            take(found, event)
    if not found.timed:
        raise BadInput(f"{trace.path} holds no event that says when it was")
    finish(found, trace)
    return found


def regular(event: Event) -> bool:
    """Whether it says when it was; then its times are numbers, and args an object."""
    begin, length = number(event.get("ts")), number(event.get("dur") or 0)
    event["ts"], event["dur"] = begin, length if length is not None and length > 0 else 0.0
    if not isinstance(event.get("args"), dict):
        event["args"] = {}
    return begin is not None


def number(value: Any) -> float | None:
    """Some writers put numbers in quotes."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def take(found: Collected, event: Event) -> None:
    kind = str(event.get("cat") or "").lower()
    name = str(event.get("name") or "")
    if kind == "kernel":
        take_kernel(found, event, name)
    elif kind in ("cuda_runtime", "cuda_driver", "runtime"):
        correlation = correlation_of(event)
        if correlation >= 0 and ("Launch" in name or "launch" in name):
            found.launches.add(correlation, event)
    elif kind == "cpu_op" or kind == "operator":
        span(found, event)
        if name in COPIES:
            found.copies.add(event, COPIES[name], thread=thread(event))
        elif name.startswith("tide::"):
            found.tide += 1
    elif kind in ("user_annotation", "annotation", ""):
        take_annotation(found, event, name)


def take_annotation(found: Collected, event: Event, name: str) -> None:
    if name.startswith("ProfilerStep"):
        found.steps.setdefault(name, (event["ts"], event["ts"] + event["dur"]))
    elif name.startswith(FSDP):
        found.ranges.add(event, name[len(FSDP) :], thread=thread(event))
    elif name.startswith("gloo:"):
        found.waits.add(event, collective(name))
    elif name.startswith(FSDP1):
        found.fsdp1 += 1
    elif name.startswith("tide::"):
        found.tide += 1


def take_kernel(found: Collected, event: Event, name: str) -> None:
    span(found, event)
    arguments = event["args"]
    lower = name.lower()
    communicates = any(word in lower for word in COMMUNICATION)
    kind = collective(str(arguments.get("Collective name") or name)) if communicates else COMPUTE
    if not communicates:
        kind = next((kind for word, kind in COPY_KERNELS if word in lower), COMPUTE)
    blocks = 1
    grid = arguments.get("grid")
    for part in grid if isinstance(grid, list) else ():
        blocks *= max(1, int(number(part) or 1))
    found.kernels.add(event, kind, blocks=blocks, correlation=correlation_of(event))


def correlation_of(event: Event) -> int:
    """-1 where there is none."""
    value = event["args"].get("correlation")
    return value if isinstance(value, int) and 0 <= value < 1 << 53 else -1


def span(found: Collected, event: Event) -> None:
    found.first = min(found.first, event["ts"])
    found.last = max(found.last, event["ts"] + event["dur"])


def collective(name: str) -> str:
    lower = name.lower()
    for kind, words in COLLECTIVES:
        if any(word in lower for word in words):
            return kind
    return OTHER_COLLECTIVE


def thread(event: Event) -> int:
    value = event.get("tid")
    return (
        value if isinstance(value, int) and abs(value) < 1 << 53 else hash(str(value)) % (1 << 31)
    )


def finish(found: Collected, trace: Trace) -> None:
    found.truncated, found.broken = trace.truncated, trace.broken
    information = trace.header.get("distributedInfo")
    if isinstance(information, dict):
        rank, ranks = information.get("rank"), information.get("world_size")
        found.rank = rank if isinstance(rank, int) else None
        found.ranks = ranks if isinstance(ranks, int) else None
        found.backend = str(information.get("backend", ""))
    devices = trace.header.get("deviceProperties")
    if isinstance(devices, list) and devices and isinstance(devices[0], dict):
        found.sms = max(0, int(number(devices[0].get("numSms")) or 0))
        found.device = str(devices[0].get("name", ""))
