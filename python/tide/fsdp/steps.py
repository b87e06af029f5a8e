"""The last training steps as the flight record shows them: who was waited for in each.

A step ends with the reduce that a forward follows: of all reduces the one with the most gathers
behind it. The record holds TIDE_FLIGHT_RECORD calls: of a longer history only the end, from the
first whole step on. Worked example, groups a and b:

    gather a, gather b | gather b, reduce b, gather a, reduce a      forward | backward
    gather a, gather b | gather b, reduce b, gather a, reduce a      the next step
    gather a                                                         begun: not shown

Behind reduce a come three gathers, behind reduce b one: steps end with reduce a.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """Of one process group on this rank. Times in seconds."""

    process_group: str
    calls: int  # gathers and reduces
    waited: float
    ranks: dict[int, float]  # rank -> waited in calls that waited longest for it
    groups: dict[str, float]  # group -> waited in its calls

    @property
    def latest(self) -> int | None:
        """The rank that most of the waiting was for."""
        return max(self.ranks, key=self.ranks.__getitem__, default=None)

    @property
    def slowest(self) -> str | None:
        """The group whose calls waited longest."""
        return max(self.groups, key=self.groups.__getitem__, default=None)


def of(backends: Iterable[Any], groups: set[str]) -> list[Step]:
    """groups: those of the model; calls of others do not count."""
    result = []
    for backend in backends:
        tell = getattr(backend, "flight_record", None)
        record = json.loads(tell()) if tell is not None else None
        if isinstance(record, dict):
            calls = [one for one in record["operations"] if subject(one) in groups]
            whole = bool(calls) and int(record["operations"][0]["sequence"]) <= 1
            result += [step(record["group"], calls_of) for calls_of in cut(calls, whole)]
    return result


def subject(call: Json) -> str:
    return str(call["subject"]).strip("'")


def cut(calls: list[Json], whole: bool) -> list[list[Json]]:
    """whole: the first call is the first of a step."""
    last = closing_group(calls)
    steps: list[list[Json]] = [[]]
    for call in calls:
        if call["state"] != "done":
            break
        steps[-1].append(call)
        if call["kind"] == "reduce" and subject(call) == last:
            steps.append([])
    return steps[0 if whole else 1 : -1]


def closing_group(calls: list[Json]) -> str:
    """The group whose reduce ends a step; of several that could, the one that came to it last."""
    behind: dict[str, int] = {}  # group -> most gathers between its reduce and the next one
    last, gathers = "", 0
    for call in calls:
        if call["kind"] == "gather":
            gathers += 1
        elif call["kind"] == "reduce":
            if last:
                behind[last] = max(behind[last], gathers)
            last, gathers = subject(call), 0
            behind.setdefault(last, 0)
    return max(reversed(behind), key=behind.__getitem__, default="")


def step(process_group: str, calls: list[Json]) -> Step:
    ranks: Counter[int] = Counter()
    groups: Counter[str] = Counter()
    for call in calls:
        waited = int(call.get("waited_microseconds", 0))
        if waited:
            ranks[int(call["longest_for_rank"])] += waited
            groups[subject(call)] += waited
    return Step(
        process_group,
        len(calls),
        sum(groups.values()) / 1e6,
        {rank: time / 1e6 for rank, time in sorted(ranks.items())},
        {name: time / 1e6 for name, time in groups.items()},
    )


def table(steps: list[Step]) -> str:
    """The newest last; at most 100 columns."""
    if not steps:
        return "no whole step in the flight record so far"
    lines = [
        f"{'step':>5} {'process group':<24} {'calls':>6} {'waited':>11}  {'most for rank':<22} "
        f"{'most in group':<24}"
    ]
    for back, one in enumerate(reversed(steps)):
        late = "-"
        if one.latest is not None:
            late = f"{one.latest} ({one.ranks[one.latest] / one.waited:.0%})"
        lines.insert(
            1,
            f"{-back:>5} {one.process_group[-24:]:<24} {one.calls:>6} {one.waited * 1e3:>8.1f} ms  "
            f"{late:<22} {(one.slowest or '-')[-24:]:<24}".rstrip(),
        )
    return "\n".join(lines)
