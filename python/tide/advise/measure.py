"""What communication costs a step of one rank: spans of its trace, added up. Times in seconds.

GPU traces: kernels count. A layout copy belongs to the operation that launched it (by correlation),
else to its kernel's name. Communication is *exposed* while no other kernel runs.
CPU traces: operations count. Communication is exposed while FSDP2 itself waits for it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tide.advise import spans
from tide.advise.collect import COMPUTE, COPY_KINDS, Collected, Table

SERVED = ("gather", "reduce")
WAITING = ("all_gather", "post_backward_re", "post_backward_rs", "root_post_backward", "foreach")
MODULE = re.compile(r"(?: \(| for )([^()]*)\)?$")
MICRO = 1e-6
Numbers = NDArray[np.float64]
Names = NDArray[np.str_]


@dataclass
class Measured:
    """Of one rank, a step's mean, where nothing else is said."""

    path: str
    rank: int | None
    ranks: int | None
    backend: str
    device: str
    sms: int
    steps: int
    on_gpu: bool
    step: float
    copies: dict[str, float] = field(default_factory=dict)  # by kind
    exposed_copies: float = 0.0
    resident: dict[str, float] = field(default_factory=dict)  # communication, by collective
    sm_seconds: dict[str, float] = field(default_factory=dict)
    contended: float = 0.0  # SM*s that gathers and reduces held beside other kernels
    exposed: dict[str, float] = field(default_factory=dict)
    modules: dict[str, dict[str, float]] = field(default_factory=dict)  # copies, exposed
    step_times: list[float] = field(default_factory=list)
    lanes: dict[str, list[list[float]]] = field(default_factory=dict)  # of the median step
    notes: list[str] = field(default_factory=list)
    fsdp2: bool = False
    fsdp1: bool = False
    tide: bool = False


def measure(found: Collected) -> Measured:
    on_gpu = len(found.kernels) > 0
    windows = sorted(found.steps.values()) or [(found.first, found.last)]
    if not np.isfinite(windows[0][0]):
        windows = [(0.0, 0.0)]
    begin, end = windows[0][0], windows[-1][1]
    count = len(windows)
    result = Measured(
        found.path, found.rank, found.ranks, found.backend, found.device, found.sms, count, on_gpu,
        (end - begin) * MICRO / count,
    )  # fmt: skip
    result.step_times = [(b - a) * MICRO for a, b in windows]
    result.fsdp2, result.fsdp1 = len(found.ranges) > 0, found.fsdp1 > 0
    result.tide = found.tide > 0
    kinds, owners, table = gpu_kinds(found) if on_gpu else cpu_kinds(found)
    times = pairs(table)
    by_kind = {
        kind: spans.clipped(times[kinds == kind], begin, end) for kind in map(str, set(kinds))
    }
    compute = by_kind.get(COMPUTE, spans.EMPTY) if on_gpu else spans.EMPTY
    waits = cpu_waits(found) if not on_gpu else spans.EMPTY
    copy_spans = spans.union(
        np.concatenate([spans.EMPTY, *(by_kind[k] for k in COPY_KINDS if k in by_kind)])
    )
    per_step = MICRO / count
    for kind, own in by_kind.items():
        if kind in COPY_KINDS:
            result.copies[kind] = spans.length(own) * per_step
        elif kind != COMPUTE:
            result.resident[kind] = spans.length(own) * per_step
            busy = spans.union(np.concatenate([compute, copy_spans]))
            bare = spans.difference(own, busy)
            if not on_gpu:
                bare = spans.difference(spans.intersection(own, waits), copy_spans)
            result.exposed[kind] = spans.length(bare) * per_step
    result.exposed_copies = spans.length(spans.difference(copy_spans, compute)) * per_step
    if on_gpu:
        hold_sms(result, found, kinds, compute, (begin, end), per_step)
    by_module(result, kinds, owners, times, compute, waits, on_gpu, (begin, end), per_step)
    lanes(result, windows, compute, copy_spans, by_kind, waits)
    if not found.steps:
        result.notes.append("no ProfilerStep in it: the whole trace counts as one step")
    if found.truncated:
        result.notes.append(f"it ends early: {found.events:,} events before the end count")
    if found.broken:
        result.notes.append(f"{found.broken} events cannot be read and are left out")
    return result


def pairs(table: Table) -> spans.Spans:
    return np.stack((np.asarray(table.begin), np.asarray(table.end)), axis=1).reshape(-1, 2)


def names(table: Table) -> Names:
    known = np.array(table.names or [""])
    return known[np.asarray(table.name, dtype=np.int64)]


def within(
    table: Table, times: NDArray[np.float64], threads: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The table's innermost row around each time on the same thread, -1 for none."""
    found = np.full(len(times), -1, dtype=np.int64)
    if not len(table):
        return found
    own, rows = pairs(table), np.asarray(table.more["thread"])
    for one in np.unique(rows):
        mine, asked = np.flatnonzero(rows == one), np.flatnonzero(threads == one)
        inner = spans.innermost(own[mine], times[asked])
        found[asked[inner >= 0]] = mine[inner[inner >= 0]]
    return found


def gpu_kinds(found: Collected) -> tuple[Names, Names, Table]:
    """Kind and module of each kernel."""
    kinds = names(found.kernels).astype("U24")
    times, threads = launched(found)
    copies = within(found.copies, times, threads)
    copy_kinds = names(found.copies)
    inside = (copies >= 0) & (kinds == COMPUTE)
    kinds[inside] = copy_kinds[copies[inside]] if len(copy_kinds) else COMPUTE
    return kinds, module_names(found, times, threads), found.kernels


def launched(found: Collected) -> tuple[Numbers, Numbers]:
    """When and on which thread each kernel was launched; -1, -1 where the trace does not say."""
    asked = np.asarray(found.kernels.more.get("correlation", ()), dtype=np.int64)
    known = np.asarray(found.launches.correlation, dtype=np.int64)
    if not len(known):
        return np.full(len(asked), -1.0), np.full(len(asked), -1.0)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known, asked, sorter=order), len(known) - 1)]
    hit = known[at] == asked
    times, threads = (
        np.asarray(column)[at] for column in (found.launches.time, found.launches.thread)
    )
    return np.where(hit, times, -1.0), np.where(hit, threads, -1.0)


def cpu_kinds(found: Collected) -> tuple[Names, Names, Table]:
    """Kind and module of each copying operation and each collective."""
    both = Table()
    both.begin = found.copies.begin + found.waits.begin
    both.end = found.copies.end + found.waits.end
    parts = [names(table) for table in (found.copies, found.waits) if len(table)]
    kinds = np.concatenate([np.array([], "U24"), *parts]).astype("U24")
    # Gloo reduces all where a part is wanted: inside FSDP2's reduce it stands for a reduce.
    ranges = [i for i, n in enumerate(found.ranges.names) if n.startswith("post_backward_re")]
    inside = np.isin(np.asarray(found.ranges.name), ranges)
    reducing = spans.union(pairs(found.ranges)[inside])
    kinds[(kinds == "all-reduce") & spans.covers(reducing, pairs(both).mean(axis=1))] = "reduce"
    own = np.asarray(found.copies.more.get("thread", []))
    threads = np.concatenate((own, np.full(len(found.waits), main_thread(found))))
    return kinds, module_names(found, np.asarray(both.begin), threads), both


def main_thread(found: Collected) -> float:
    rows = found.ranges.more.get("thread")
    return max(set(rows), key=rows.count) if rows else -1


def module_names(
    found: Collected, times: NDArray[np.float64], threads: NDArray[np.float64]
) -> Names:
    rows = within(found.ranges, times, threads)
    known = [
        m.group(1) or "root" if (m := MODULE.search(n)) else "root" for n in found.ranges.names
    ]
    modules = np.array([*known, ""])
    index = np.asarray(found.ranges.name, dtype=np.int64)
    return modules[np.where(rows >= 0, index[rows] if len(index) else -1, len(known))]


def cpu_waits(found: Collected) -> spans.Spans:
    """While FSDP2 waits for its collectives."""
    waiting = [i for i, n in enumerate(found.ranges.names) if n.startswith(WAITING)]
    chosen = np.isin(np.asarray(found.ranges.name), waiting)
    return spans.union(pairs(found.ranges)[chosen])


def hold_sms(
    result: Measured, found: Collected, kinds: Names, compute: spans.Spans,
    window: tuple[float, float], per_step: float,
) -> None:  # fmt: skip
    """A communication kernel's CTA takes a whole SM while it lives."""
    times = np.clip(pairs(found.kernels), *window)
    sms = result.sms or 132
    held = np.minimum(np.asarray(found.kernels.more["blocks"]), sms)
    seconds = held * (times[:, 1] - times[:, 0]) * per_step
    for kind in result.resident:
        result.sm_seconds[kind] = float(seconds[kinds == kind].sum())
    served = np.isin(kinds, SERVED)
    alone = spans.length(spans.difference(spans.union(times[served]), compute))
    all_time = spans.length(spans.union(times[served]))
    share = 1 - alone / all_time if all_time else 0.0
    result.contended = float(seconds[served].sum()) * share


def by_module(
    result: Measured, kinds: Names, owners: Names, times: spans.Spans,
    compute: spans.Spans, waits: spans.Spans, on_gpu: bool, window: tuple[float, float],
    per_step: float,
) -> None:  # fmt: skip
    for module in sorted(set(owners) - {""}):
        mine = owners == module
        copies = spans.clipped(times[mine & np.isin(kinds, COPY_KINDS)], *window)
        served = spans.clipped(times[mine & np.isin(kinds, SERVED)], *window)
        bare = spans.difference(served, compute) if on_gpu else spans.intersection(served, waits)
        one = {"copies": spans.length(copies) * per_step, "exposed": spans.length(bare) * per_step}
        if any(one.values()):
            result.modules[str(module)] = one


def lanes(
    result: Measured, windows: list[tuple[float, float]], compute: spans.Spans,
    copies: spans.Spans, by_kind: dict[str, spans.Spans], waits: spans.Spans,
) -> None:  # fmt: skip
    """The median step's spans for the picture, seconds from its start."""
    begin, end = sorted(windows, key=lambda w: w[1] - w[0])[len(windows) // 2]
    shown = {"computing": compute, "FSDP2 waits": waits, "layout copies": copies}
    shown |= {k: s for k, s in by_kind.items() if k not in COPY_KINDS and k != COMPUTE}
    for name, own in shown.items():
        inside = spans.clipped(own, begin, end)
        if len(inside):
            result.lanes[name] = ((inside[:4000] - begin) * MICRO).tolist()
