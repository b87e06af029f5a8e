"""`tide doctor`: what this machine and this launch can do, which path tide would take, and for each
better path why not and what to change.

`facts` finds out, `paths` judges (pure), `launches` compares the ranks of a torchrun launch, `text`
writes.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from typing import Any

import click

from tide import look
from tide.doctor import launches, paths


def served_devices() -> tuple[str, ...]:
    from tide.fsdp import eligibility

    return tuple(eligibility.SERVED_DEVICES)


def serves_hosts() -> tuple[str, ...]:
    """Devices whose memory the rails move."""
    return ("cpu",)


def build() -> paths.Build:
    return paths.Build(served_devices(), serves_hosts(), multicast=True)


@click.command("doctor")
@look.json_option
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds to wait for the other ranks of a launch.",
)
def command(as_json: bool, timeout: float) -> int:
    """What this machine and this launch can do: versions, GPUs, links, rails and limits; which path
    tide would take and, for each better one, why not and what to change; every knob with its value.

    Under torchrun it also compares the ranks and names what differs:

        torchrun --nproc-per-node 8 --no-python tide doctor

    Exit code 1 where a knob cannot be used. Under torchrun always 0: a launcher that sees a
    failure buries the report.
    """
    from tide.doctor import facts as facts_module
    from tide.doctor import knob_table, text

    quiet = os.environ.get("RANK", "0") != "0"
    knob_states = knob_table.states()
    different: list[str] = []
    with contextlib.nullcontext() if quiet else look.ticking("looking"):
        facts = facts_module.collect()
        facts["knobs"] = {knob.name: knob.value for knob in knob_states}
        launch = facts["launch"]
        rank, ranks = launch.get("rank", 0), launch.get("ranks", 1)
        if ranks > 1:
            received = look.interruptible(lambda: launches.exchange(facts, rank, ranks, timeout))
            different = launches.differences(received)
    if rank != 0:
        return 0
    steps = paths.ladders(facts, build(), launch.get("hosts", 1))
    if as_json:
        look.print_json(as_dict(facts, steps, knob_states, different))
    else:
        click.echo(text.report(facts, steps, knob_states, different))
    return int(ranks == 1 and any(knob.problem for knob in knob_states))


def as_dict(
    facts: dict[str, Any], steps: list[paths.Ladder], knob_states: list[Any], different: list[str]
) -> dict[str, Any]:
    ladders = [
        {
            "traffic": ladder.traffic,
            "taken": ladder.taken.path if ladder.taken else None,
            "better": [asdict(rung) for rung in ladder.better],
        }
        for ladder in steps
    ]
    return {
        "facts": facts,
        "paths": ladders,
        "knobs": [asdict(knob) for knob in knob_states],
        "differences": different,
    }
