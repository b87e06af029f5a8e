"""`tide.report(model)`: what became of each FSDP2 parameter group, and why not more.

    >>> print(tide.report(model))
    group     path   gathered  reduced  slot          staging  memory    calls
    root      tide    1.2 MiB  1.2 MiB  own 1.6 MiB   area     in_place  10+10
    blocks.0  stock         -        -  -             -        -         -      (1)
    (1) rank 2: layers.weight is offloaded to the CPU between its uses

The rows are the same on every rank of a group: they follow from the vote and from the order of
calls.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tide import units
from tide.fsdp import backends, eligibility, page, seam, steps, waits
from tide.fsdp.plan import groups_of
from tide.fsdp.record import GroupRecord, record_of

WIDTH = 100


@dataclass(frozen=True)
class Row:
    """One parameter group. Sizes in bytes, for one rank.

    What arrives is counted without padding, which never moves, and as the mean over the ranks:
    where rows do not divide evenly, ranks differ by a row.
    """

    group: str
    process_group: str
    ranks: int
    parameters: int
    path: str  # "tide", "gather" or "reduce" (that direction alone), "stock"
    gathered_bytes: int  # arriving from other ranks in one training step
    reduced_bytes: int  # gradients arriving from other ranks in one training step
    slot: str  # "own" (stays unsharded between uses), "ring", "none"
    slot_bytes: int
    staging: str  # "leased", "area", "none"
    memory: str  # "in_place", "slot_reuse", "" where tide does not reduce
    gathers: int  # calls that tide served so far
    reduces: int
    stock_calls: dict[str, int]  # reason -> calls of a served group that went stock all the same
    reason: str  # why the group, or one direction, goes stock; empty: it does not


@dataclass(frozen=True)
class Report:
    rows: list[Row]
    arena_bytes: int  # memory that the process groups of these rows hold on this rank
    # By process group on a GPU: why its gathers go to each peer in turn; "": one store to all.
    no_multicast: dict[str, str] = field(default_factory=dict)
    waits: list[waits.Waits] = field(default_factory=list)  # this rank's: not equal on all
    # By process group, of those that span nodes: _C.Backend.nodes(), with this rank's rail.
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict)
    steps: list[steps.Step] = field(default_factory=list)  # this rank's last ones

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "arena_bytes": self.arena_bytes,
            "no_multicast": self.no_multicast,
            "nodes": self.nodes,
        }

    def waits_dict(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.waits]

    def waits_table(self) -> str:
        """By group: how long this rank waited, for what, and for which rank most."""
        return waits.table(self.waits)

    def steps_dict(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self.steps]

    def steps_table(self) -> str:
        """The last steps: how long this rank waited in each, for which rank and in which group
        most."""
        return steps.table(self.steps)

    def html(self, path: str | Path) -> None:
        """Writes the report, the waits and the last steps as one page that needs no network."""
        Path(path).write_text(page.page(self))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        return "\n".join(table(self.rows) + _rails(self.nodes) + _footer(self))


def report(model: torch.nn.Module) -> Report:
    """A row for each parameter group under `model`, in the order of its modules.

    Raises TypeError when no module under `model` went through `fully_shard`.
    """
    rows: list[Row] = []
    arenas: dict[int, Any] = {}
    no_multicast: dict[str, str] = {}
    for group in _groups(model):
        record = record_of(group)
        rows.append(_row(group, record or _unplanned(group)))
        if record is not None:
            for backend in (record.gather_backend, record.reduce_backend):
                if backend is not None:
                    arenas[id(backend)] = backend
            if record.gather_backend is not None:
                why_not = record.gather_backend.no_multicast()
                if why_not is not None:
                    no_multicast[record.process_group] = why_not
    if not rows:
        raise TypeError("no module under this one was given to torch.distributed.fsdp.fully_shard")
    held = sum(int(b.counters().get("arena_bytes", 0)) for b in arenas.values())
    calls = {}
    for row in rows:
        calls[row.group, "gather"], calls[row.group, "reduce"] = row.gathers, row.reduces
    return Report(
        rows,
        held,
        no_multicast,
        waits.of(list(arenas.values()), calls),
        _nodes(arenas.values()),
        steps.of(arenas.values(), {row.group for row in rows}),
    )


def _nodes(found: Iterable[Any]) -> dict[str, dict[str, Any]]:
    result = {}
    for backend in found:
        tell = getattr(backend, "nodes", None)
        nodes = json.loads(tell()) if tell is not None else {}
        if nodes:
            result[backend.options.group_name] = nodes
    return result


def _rails(nodes: dict[str, dict[str, Any]]) -> list[str]:
    lines = []
    for group, one in nodes.items():
        lines += _wrapped(
            f"group '{group}': {one['nodes']} nodes of {one['local_ranks']} ranks; this rank is "
            f"number {one['local']} of node {one['node']} and sends over {one['device']} "
            f"({one['transport']}, {one['version']})"
        )
        for note in one["notes"]:
            lines += _wrapped(f"    {note}")
    return lines


def _groups(model: torch.nn.Module) -> list[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        state = getattr(module, "_get_fsdp_state", None)
        for group in groups_of(state()) if state is not None else []:
            found.setdefault(id(group), group)
    return list(found.values())


def _unplanned(group: Any) -> GroupRecord:
    """Stands for a group whose root has not run forward, or was initialised before tide came."""
    record = GroupRecord(eligibility.group_name(group))
    record.reason = seam.refusal() or eligibility.without_vote(group)
    if not record.reason:
        shard_group = group.mesh_info.shard_process_group
        record.ranks = shard_group.size()
        record.process_group = eligibility.process_group_name(shard_group)
        backend = backends.find(shard_group, group.device)
        if backend is None:
            record.reason = eligibility.not_on_tide(group)
        elif backends.settings(backend).directions == "0":
            record.reason = eligibility.SWITCHED_OFF
        else:
            record.reason = "not planned yet: tide plans at the root's first forward"
    return record


def _row(group: Any, record: GroupRecord) -> Row:
    gathers, reduces = record.gather_backend is not None, record.reduce_backend is not None
    paths = {(True, True): "tide", (True, False): "gather", (False, True): "reduce"}
    others = record.ranks - 1
    # Resharded parameters are gathered once for forward and once for backward.
    times = 2 if record.reshards_after_forward and record.trainable else 1
    slot = "own" if record.has_own_slot else "ring"
    return Row(
        group=record.name,
        process_group=record.process_group,
        ranks=record.ranks,
        parameters=len(group.fsdp_params),
        path=paths.get((gathers, reduces), "stock"),
        gathered_bytes=record.unsharded_bytes * others * times // record.ranks if gathers else 0,
        reduced_bytes=record.gradient_bytes * others // record.ranks if reduces else 0,
        slot=slot if gathers else "none",
        slot_bytes=record.slot_bytes if gathers else 0,
        staging=record.staging if reduces else "none",
        memory=record.memory if reduces else "",
        gathers=record.gathers,
        reduces=record.reduces,
        stock_calls=dict(record.stock_calls),
        reason=record.reason,
    )


def table(rows: list[Row]) -> list[str]:
    heads = ("group", "path", "gathered", "reduced", "slot", "staging", "memory", "calls")
    lines = [_cells(row) for row in rows]
    widths = [max(len(head), *(len(x[i]) for x in lines)) for i, head in enumerate(heads)]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    table = [_line(heads, widths)]
    noted: dict[str, int] = {}
    for row, cells in zip(rows, lines, strict=True):
        numbers = []
        for reason in filter(None, (row.reason, *row.stock_calls)):
            numbers.append(noted.setdefault(reason, len(noted) + 1))
        marks = " " + " ".join(f"({number})" for number in numbers) if numbers else ""
        table.append(_line(cells, widths) + marks)
    for reason, number in noted.items():
        times = [row.stock_calls[reason] for row in rows if reason in row.stock_calls]
        served = any(row.path != "stock" and reason == row.reason for row in rows)
        counted = f" ({sum(times)} calls)" if times and not served else ""
        table += _wrapped(f"({number}) {reason}{counted}")
    return table


def _cells(row: Row) -> tuple[str, ...]:
    slot = f"{row.slot} {_bytes(row.slot_bytes)}" if row.slot != "none" else "-"
    calls = f"{row.gathers}+{row.reduces}" if row.path != "stock" else "-"
    return (
        row.group,
        row.path,
        _bytes(row.gathered_bytes),
        _bytes(row.reduced_bytes),
        slot,
        row.staging if row.staging != "none" else "-",
        row.memory or "-",
        calls,
    )


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first = cells[0] if len(cells[0]) <= widths[0] else "…" + cells[0][1 - widths[0] :]
    parts = [first.ljust(widths[0])]
    for index, (cell, width) in enumerate(zip(cells[1:], widths[1:], strict=True), 1):
        parts.append(cell.rjust(width) if index in (2, 3) else cell.ljust(width))
    return "  ".join(parts).rstrip()


def _footer(result: Report) -> list[str]:
    served = sum(row.path != "stock" for row in result.rows)
    return _wrapped(
        f"{served} of {len(result.rows)} groups on tide; gathered and reduced: bytes that arrive "
        f"from other ranks in one training step; calls: gathers + reductions so far; arena: "
        f"{_bytes(result.arena_bytes)}",
        indent="",
    ) + [line for name, why in result.no_multicast.items() for line in _multicast(name, why)]


def _multicast(process_group: str, why_not: str) -> list[str]:
    how = f"go to each peer in turn: {why_not}" if why_not else "are one store to all (multicast)"
    return _wrapped(f"gathers of '{process_group}' {how}", indent="")


def _wrapped(text: str, indent: str = "    ") -> list[str]:
    return textwrap.wrap(text, WIDTH, subsequent_indent=indent)


def _bytes(number: int) -> str:
    return units.size(number) if number else "-"
