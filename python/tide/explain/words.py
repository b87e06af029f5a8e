"""From flight records to sentences. Pure.

Worked example: ranks 0, 1 and 3 of 4 stand in gather 17 and wait for rank 2; rank 2's last call is
16, done. Then "everyone waited for rank 2": it never came to call 17. A rank that waits itself is
only a link: the chain of "waits for" is followed to the rank that waits for nobody.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter, defaultdict
from typing import Any

from tide.look import WIDTH
from tide.units import duration

Json = dict[str, Any]
WAITED_FOR = re.compile(r"from (?:node \d+ \()?rank (\d+)")
LOST = re.compile(r"rank (\d+)(?: \(process \d+\))? (?:ended|has closed|closed its connection)")


def explain(dumps: list[Json]) -> list[Json]:
    """A story for each group that stands in the dumps, the most troubled first."""
    groups: dict[str, dict[int, Json]] = defaultdict(dict)
    ranks_of: dict[str, int] = {}
    for dump in dumps:
        for record in dump["groups"]:
            groups[record["group"]][record["rank"]] = record
            ranks_of[record["group"]] = record["ranks"]
    stories = [story(name, ranks_of[name], records) for name, records in groups.items()]
    return sorted(stories, key=lambda one: one["culprit"] is None)


def story(name: str, ranks: int, records: dict[int, Json]) -> Json:
    missing = sorted(set(range(ranks)) - set(records))
    waits = {rank: who for rank, one in records.items() if (who := waited_for(one)) is not None}
    last = {rank: last_call(one) for rank, one in records.items()}
    culprit = who_is_late(waits, last, missing)
    sentences = []
    if culprit is not None:
        sentences.append(about(culprit, waits, last, records, missing))
    for rank, record in sorted(records.items()):
        call = stuck(record)
        if call is not None and rank != culprit:
            sentences.append(f"rank {rank}: {what_it_did(call)}")
    if missing:
        listed = ", ".join(map(str, missing))
        sentences.append(f"no record of rank{'s' if len(missing) > 1 else ''} {listed}")
    errors = Counter(one["error"] for one in records.values() if one.get("error"))
    if errors:
        sentences.append(f"the error: {errors.most_common(1)[0][0]}")
    slow = usually_late(records)
    if slow and culprit is None:
        sentences.append(slow)
    if not sentences:
        sentences.append("nobody waits; the last call of every rank is done")
    return {"group": name, "ranks": ranks, "culprit": culprit, "sentences": sentences}


def stuck(record: Json) -> Json | None:
    """The oldest call that is not done."""
    return next((o for o in record["operations"] if o["state"] in ("running", "failed")), None)


def waited_for(record: Json) -> int | None:
    call = stuck(record)
    if call is None:
        return None
    text = call.get("waiting") or call.get("error") or ""
    match = LOST.search(text) or WAITED_FOR.search(text)
    who = int(match.group(1)) if match else int(call.get("longest_for_rank", -1))
    return who if who not in (-1, record["rank"]) else None


def last_call(record: Json) -> int:
    """The sequence of the last call that the rank came to; -1 for none."""
    return max((int(o["sequence"]) for o in record["operations"]), default=-1)


def who_is_late(waits: dict[int, int], last: dict[int, int], missing: list[int]) -> int | None:
    """The end of the chain of waits that most ranks stand in."""
    ends: Counter[int] = Counter()
    for start in waits:
        seen, at = {start}, waits[start]
        while at in waits and at not in seen:
            seen.add(at)
            at = waits[at]
        # In a ring of waits the rank that came least far is the late one.
        ring = at in seen
        ends[min(seen, key=lambda r: (last.get(r, -1), r)) if ring else at] += 1
    if not ends:
        return None
    return min(ends, key=lambda r: (-ends[r], r not in missing, last.get(r, -1), r))


def about(
    culprit: int, waits: dict[int, int], last: dict[int, int], records: dict[int, Json],
    missing: list[int],
) -> str:  # fmt: skip
    waiting = [rank for rank in waits if rank != culprit]
    everyone = (
        "everyone"
        if len(waiting) == len(records) - (culprit in records)
        else (f"rank{'s' if len(waiting) > 1 else ''} {', '.join(map(str, sorted(waiting)))}")
    )
    subject = f"{everyone} waited for rank {culprit}"
    furthest = max((last[rank] for rank in waiting), default=-1)
    if culprit in missing:
        return f"{subject}, which left no record: it died, or hangs outside tide"
    if last.get(culprit, -1) < furthest:
        return (
            f"{subject}: its last call is number {last[culprit]}, the others are at {furthest}; it "
            "computes longer, hangs outside tide, or left its loop early"
        )
    call = stuck(records[culprit])
    if call is not None:
        return f"{subject}, which stands in the same call: {what_it_did(call)}"
    return f"{subject}, which has done its part: a message was lost or is late"


def what_it_did(call: Json) -> str:
    subject = call["subject"].strip("'")
    text = f"{call['kind']} {call['sequence']} of '{subject}', {call['state']} "
    text += f"after {duration(call['microseconds'] / 1e6)}"
    reason = call.get("waiting") or call.get("error") or ""
    own, reported, _ = reason.partition(" reported: ")  # what a peer said is that peer's sentence
    return f"{text}: {own}{' reported it' if reported else ''}" if reason else text


def usually_late(records: dict[int, Json]) -> str:
    """Who was waited for longest in the calls that are done."""
    times: Counter[int] = Counter()
    for record in records.values():
        for call in record["operations"]:
            if call.get("longest_for_rank", -1) >= 0:
                times[call["longest_for_rank"]] += call.get("waited_microseconds", 0)
    if not times:
        return ""
    (rank, most), total = times.most_common(1)[0], sum(times.values())
    if total < 1000 or most * 2 < total:
        return ""
    return (
        f"nobody hangs; of {duration(total / 1e6)} waited in the recorded calls {most / total:.0%} "
        f"was for rank {rank}"
    )


def wrapped(sentence: str) -> str:
    return textwrap.fill(sentence, WIDTH, initial_indent="  ", subsequent_indent="      ")
