"""tide.Options: what a program may set for one process group.

    dist.init_process_group("tide", pg_options=tide.Options(memory_mode="slot_reuse"))

Options is compiled (it travels through c10d's own calls); this module builds and completes it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch  # noqa: F401  before _C, which needs its libraries

from tide import _C, knobs
from tide.ucx_package import packaged_ucx

_WORDS = {
    "inner_cpu": "TIDE_INNER_CPU",
    "inner_cuda": "TIDE_INNER_CUDA",
    "memory_mode": "TIDE_MEMORY_MODE",
    "fsdp": "TIDE_FSDP",
    "multicast": "TIDE_MULTICAST",
    "rails": "TIDE_RAILS",
    "ucx_library": "TIDE_UCX_LIBRARY",
    "schedule": "TIDE_SCHEDULE",
    "pacing": "TIDE_PACING",
}
_NUMBERS = {
    "node_size": "TIDE_NODE_SIZE",
    "own_collectives": "TIDE_COLLECTIVES",
    "arena_limit_bytes": "TIDE_ARENA_LIMIT",
    "staging_slice_bytes": "TIDE_STAGING_SLICE",
    "landing_slice_bytes": "TIDE_LANDING_SLICE",
    "flight_record_size": "TIDE_FLIGHT_RECORD",
    "head_bytes": "TIDE_HEAD_BYTES",
}


FIELDS = _WORDS | _NUMBERS
"""Field of Options -> its knob."""


def Options(timeout: timedelta | None = None, **fields: Any) -> _C.Options:
    """Options for one process group; each field not given follows its TIDE_ knob.

    timeout: of every wait of the group; without it, the one given to ``init_process_group``.
    inner_cpu, inner_cuda: names of the c10d backends that serve what tide does not ("gloo",
    "nccl").
    node_size: cuts one host's ranks into nodes of this many (0: one node).
    memory_mode: "in_place" or "slot_reuse". fsdp: "both", "gather", "reduce" or "0".
    multicast: "auto" or "0".
    own_collectives: 0 hands the layout collectives to the inner backend.
    rails, ucx_library, schedule, pacing, head_bytes: between nodes; see the knobs.
    arena_limit_bytes, staging_slice_bytes, landing_slice_bytes, flight_record_size: numbers, sizes
    in bytes.

    Raises TypeError for a field that does not exist and ValueError for a word that is not one of a
    field's choices.
    """
    options = _C.Options(timeout) if timeout is not None else _C.Options()
    for name, value in fields.items():
        if name not in FIELDS:
            known = ", ".join(sorted(FIELDS))
            raise TypeError(f"tide.Options has no field {name!r}; fields: timeout, {known}")
        choices = knobs.KNOBS[_WORDS[name]].choices if name in _WORDS else ()
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {choices}; got {value!r}")
        setattr(options, name, value)
    return options


def completed(given: object | None, timeout: timedelta) -> _C.Options:
    """A copy of `given` in which every field left empty holds its knob's value. Raises TypeError
    for other options."""
    if given is not None and not isinstance(given, _C.Options):
        raise TypeError(
            f"the options of a tide group must be tide.Options, got {type(given).__name__}; those "
            "of an inner backend are set on that backend itself: tide.inner(group, device)"
        )
    default = _C.Options()._timeout
    if given is not None and timeout == default and given._timeout != default:
        timeout = given._timeout
    options = _C.Options(timeout)
    for name, knob in _WORDS.items():
        setattr(options, name, (getattr(given, name) if given else "") or knobs.text(knob))
    for name, knob in _NUMBERS.items():
        value = getattr(given, name) if given else -1
        setattr(options, name, value if value >= 0 else knobs.number(knob))
    options.ucx_candidates = packaged_ucx()
    return options
