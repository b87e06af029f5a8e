"""Who was waited for: the engine's host times, by FSDP2 group, for `tide.report`.

Times are of this rank since its groups were made. A group whose waits are a device's has none.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Waits:
    """Of one group and direction."""

    group: str
    kind: str  # "gather" or "reduce"
    calls: int
    waits: int  # that really waited
    seconds: float
    causes: dict[str, float]  # counter's name -> seconds
    ranks: list[float]  # seconds waited for each rank
    histogram: list[
        int
    ]  # entry b: waits of less than 2^b microseconds, and not of the entry before

    @property
    def latest(self) -> int | None:
        """The rank that was waited for longest."""
        return max(range(len(self.ranks)), key=self.ranks.__getitem__) if self.waits else None


def of(backends: list[Any], calls: dict[tuple[str, str], int]) -> list[Waits]:
    """calls: (group, kind) -> calls so far; what is not in it is no FSDP2 group of this model."""
    result = []
    for backend in backends:
        tell = getattr(backend, "wait_times", None)
        for one in json.loads(tell()) if tell is not None else []:
            key = (one["subject"].strip("'"), one["kind"])
            if key not in calls:
                continue
            result.append(
                Waits(
                    *key,
                    calls=calls[key],
                    waits=one["waits"],
                    seconds=one["microseconds"] / 1e6,
                    causes={name: time / 1e6 for name, time in one["causes"].items()},
                    ranks=[time / 1e6 for time in one["ranks"]],
                    histogram=one["histogram"],
                )
            )
    order = list(calls)
    return sorted(result, key=lambda one: order.index((one.group, one.kind)))


def table(all_waits: list[Waits]) -> str:
    """At most 100 columns."""
    if not all_waits:
        return "no waits on the host so far"
    lines = [
        f"{'group':<32} {'':<7}{'calls':>7}{'waited':>11}{'a call':>10}  {'most for':<20} "
        f"{'for rank':>9}"
    ]
    for one in all_waits:
        cause = max(one.causes, key=one.causes.__getitem__, default="-")
        latest = "-" if one.latest is None else str(one.latest)
        each = one.seconds / max(1, one.calls)
        lines.append(
            f"{one.group[-32:]:<32} {one.kind:<7}{one.calls:>7}{one.seconds * 1e3:>8.1f} ms"
            f"{each * 1e3:>7.2f} ms  {cause[:20]:<20} {latest:>9}"
        )
    return "\n".join(lines)
