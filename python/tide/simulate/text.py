"""What `tide simulate` prints."""

from __future__ import annotations

from typing import Any

from tide import look
from tide.simulate.native import native
from tide.simulate.run import Answer, Question
from tide.units import duration, size

SOURCE = "`tide simulate --constants` names what the simulated numbers stand on."


def table(title: str, *columns: str) -> Any:
    from rich.table import Table

    made = Table(title=title or None)
    for position, column in enumerate(columns):
        made.add_column(column, justify="right" if position else "left")
    return made


def show(question: Question, found: list[Answer]) -> None:
    console = look.console()
    model, cluster = question.model, question.cluster
    console.print(
        f"{model.name}, {model.numel / 1e9:.1f} billion parameters, {question.tokens} tokens a GPU"
        "\n"
        f"{question.nodes * question.local_ranks} x {cluster.gpu} ({cluster.name}: {cluster.note})"
    )
    console.print(steps(found))
    console.print(
        "exposed: step less computing alone; SM*s: SM time that communication holds; resident:\n"
        "share of the step with a communication kernel on an SM; a rail: bytes that a GPU sends\n"
        "to other nodes; memory: unsharded groups and communication buffers at the peak."
    )
    console.print(collectives(question, found))
    console.print(SOURCE)


def steps(found: list[Answer]) -> Any:
    columns = ("step", "gain", "exposed", "copies", "SM*s", "resident", "a rail", "memory")
    made = table("A step, simulated", "", *columns)
    stock = found[0].step.total_s
    for one in found:
        step = one.step
        made.add_row(
            one.system,
            duration(step.total_s),
            f"{1 - step.total_s / stock:+.1%}" if one is not found[0] else "",
            duration(step.exposed_s),
            duration(step.copies_s),
            f"{step.sm_s:.1f}",
            f"{step.resident_s / step.total_s:.0%}",
            size(step.rail_bytes),
            size(one.memory_bytes),
        )
    return made


def collectives(question: Question, found: list[Answer]) -> Any:
    columns = ("bf16", "gather", "beside products", "reduce", "beside products", "schedule")
    made = table("Collectives of a group, simulated", "", "group", *columns)
    for one in found:
        for group, cost in zip(question.model.groups, one.costs, strict=True):
            made.add_row(
                one.system,
                f"{group.count} x {group.name}",
                size(2.0 * group.numel),
                duration(cost.gather.alone_s),
                duration(cost.gather.beside_s),
                duration(cost.reduce.alone_s),
                duration(cost.reduce.beside_s),
                cost.gather.schedule or "-",
            )
    return made


def show_constants(as_json: bool) -> None:
    if as_json:
        names = ("constant", "value", "unit", "source")
        rows = [dict(zip(names, row, strict=True)) for row in native().cost_constants()]
        look.print_json({"constants": rows})
        return
    made = table("What simulated numbers stand on", "constant", "value", "", "where it is from")
    made.columns[2].justify = made.columns[3].justify = "left"
    for name, value, unit, source in native().cost_constants():
        made.add_row(name, f"{value:.4g}", unit, source)
    look.console().print(made)
