"""Every knob with its value, default and origin; and TIDE_ variables that are no knobs."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass

from tide import knobs


@dataclass(frozen=True)
class KnobState:
    name: str
    value: str
    default: str
    origin: str  # "default" or "environment"
    line: str
    problem: str = ""  # why the value cannot be used


def states() -> list[KnobState]:
    result = []
    for name, knob in knobs.KNOBS.items():
        value = os.environ.get(name, knob.default)
        problem = ""
        try:
            if knob.minimum is not None:
                knobs.number(name)
            else:
                knobs.text(name)
        except ValueError as error:
            problem = str(error)
        origin = "environment" if name in os.environ else "default"
        result.append(KnobState(name, value, knob.default, origin, knob.line, problem))
    for name in sorted(os.environ):
        if name.startswith("TIDE_") and name not in knobs.KNOBS:
            close = difflib.get_close_matches(name, knobs.KNOBS, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            problem = f"not a knob of tide{hint}"
            result.append(KnobState(name, os.environ[name], "", "environment", "", problem))
    return result
