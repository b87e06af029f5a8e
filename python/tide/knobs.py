"""Every TIDE_ environment variable, declared once: name, default, range, one line.

A knob is read when a process group is created. ``tide.Options`` given to ``init_process_group`` or
``new_group`` comes before it. Those that choose what a call does are compared when a group is made
(settings.py): ranks that differ get an error.
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    """One environment variable. `choices` for words, `minimum` for numbers; sizes are in bytes."""

    name: str
    default: str
    line: str
    choices: tuple[str, ...] = ()
    minimum: int | None = None

    @property
    def range(self) -> str:
        """What may be set, for people."""
        if self.choices:
            return " | ".join(self.choices)
        return f"a number, {self.minimum} or more" if self.minimum is not None else "a name"


KNOBS: dict[str, Knob] = {
    knob.name: knob
    for knob in (
        Knob(
            "TIDE_FSDP",
            "both",
            "which directions of FSDP2 tide serves",
            ("both", "gather", "reduce", "0"),
        ),
        Knob(
            "TIDE_MEMORY_MODE",
            "in_place",
            "where a reduce reads gradients: as autograd left them, or moved into the vacated slot",
            ("in_place", "slot_reuse"),
        ),
        Knob(
            "TIDE_COLLECTIVES",
            "1",
            "0 hands the layout collectives to the inner backend too",
            ("0", "1"),
        ),
        Knob("TIDE_INNER_CPU", "gloo", "c10d backend for CPU tensors where tide does not serve"),
        Knob("TIDE_INNER_CUDA", "nccl", "c10d backend for CUDA tensors where tide does not serve"),
        Knob(
            "TIDE_NODE_SIZE",
            "0",
            "cuts one host's ranks into nodes of this many; 0: one node",
            minimum=0,
        ),
        Knob(
            "TIDE_RAILS",
            "",
            "network devices of a node's ranks in local order, as mlx5_{0-7}; found without it",
        ),
        Knob(
            "TIDE_UCX_LIBRARY", "", "file of the UCX library; without it the system's, or libucx's"
        ),
        Knob(
            "TIDE_SCHEDULE",
            "doubling",
            "who sends which shards to whom in a gather between nodes",
            ("doubling", "ring", "direct"),
        ),
        Knob(
            "TIDE_PACING",
            "confirm_head",
            "when the next round of a gather between nodes may start",
            ("confirm_head", "confirm_whole", "grant", "off"),
        ),
        Knob(
            "TIDE_HEAD_BYTES",
            str(8 << 20),
            "bytes of a round between nodes that the next one waits for",
            minimum=0,
        ),
        Knob(
            "TIDE_ARENA_LIMIT",
            "0",
            "bytes of arena a process may hold, all groups together; 0: no limit",
            minimum=0,
        ),
        Knob(
            "TIDE_STAGING_SLICE",
            "0",
            "bytes of one slice of a reduce's staging area; 0: 2 MiB on the CPU, 16 MiB on a GPU",
            minimum=0,
        ),
        Knob(
            "TIDE_LANDING_SLICE",
            str(1 << 20),
            "bytes of one slice of a bounced gather's landing area",
            minimum=4096,
        ),
        Knob(
            "TIDE_MULTICAST",
            "auto",
            "NVLink multicast where every rank may use it; 0 on any rank: copies to each peer",
            ("auto", "0"),
        ),
        Knob(
            "TIDE_FLIGHT_RECORD",
            "256",
            "operations that a group's flight record shows; more than 512 are not kept",
            minimum=1,
        ),
        Knob("TIDE_DUMP", "", "path of flight record files before the rank; beside PyTorch's"),
        Knob(
            "TIDE_DUMP_SIGNAL",
            "0",
            "number of the signal that dumps the flight record; 0: none",
            minimum=0,
        ),
        Knob(
            "TIDE_FSDP_FORCE",
            "0",
            "1 tries FSDP2 on a version of torch that tide does not know",
            ("0", "1"),
        ),
    )
}


def text(name: str) -> str:
    """The knob's value. Raises ValueError naming the knob, what may be set, and what was."""
    knob = KNOBS[name]
    value = os.environ.get(name, knob.default)
    if knob.choices and value not in knob.choices:
        raise ValueError(f"{name} must be one of: {knob.range}; it is {value!r}")
    return value


def number(name: str) -> int:
    """The knob's value as a number. Raises ValueError naming the knob, what may be set, and what
    was."""
    knob = KNOBS[name]
    value = text(name)
    try:
        result = int(value)
    except ValueError:
        raise ValueError(f"{name} must be {knob.range}; it is {value!r}") from None
    if knob.minimum is not None and result < knob.minimum:
        raise ValueError(f"{name} must be {knob.range}; it is {value!r}")
    return result
