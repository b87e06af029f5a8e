"""What one rank of a run remembers: its losses with their times, and its peak memory.

Losses come from a line with "loss" in it (and, where it says so, "step"), from a JSON line, from
TensorBoard's add_scalar, or from `tide.parity.log(step, loss)`; the most explicit source that
spoke wins.
"""

from __future__ import annotations

import json
import math
import re
import resource
import time
from pathlib import Path
from typing import Any, TextIO

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
STEP = re.compile(r"\b(?:step|iter(?:ation)?)\b\W{0,3}(\d+)", re.IGNORECASE)
LOSS = re.compile(r"\b(?:train[_ ])?loss\b[\"']?\s*[:=,]?\s*" + NUMBER, re.IGNORECASE)
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SOURCES = ("callback", "tensorboard", "json", "text")
"""The most explicit first."""


class Recorder:
    def __init__(self) -> None:
        self.by_source: dict[str, list[tuple[int, float, float]]] = {}  # step, loss, time
        self._tag = ""

    def add(self, source: str, step: int | None, loss: float) -> None:
        rows = self.by_source.setdefault(source, [])
        at = step if step is not None else len(rows)
        if math.isfinite(loss) and not (rows and rows[-1][0] == at):
            rows.append((at, loss, time.monotonic()))

    def line(self, text: str) -> None:
        text = ESCAPES.sub("", text).strip()
        if "loss" not in text.lower():
            return
        if text.startswith("{"):
            try:
                values = json.loads(text)
            except ValueError:
                values = None
            if isinstance(values, dict):
                self.values(values)
                return
        found = LOSS.search(text)
        if found:
            step = STEP.search(text)
            self.add("text", int(step.group(1)) if step else None, float(found.group(1)))

    def values(self, values: dict[str, Any]) -> None:
        loss = next((values[k] for k in ("loss", "train_loss", "train/loss") if k in values), None)
        step = next((values[k] for k in ("step", "iteration", "iter") if k in values), None)
        if isinstance(loss, int | float):
            self.add("json", step if isinstance(step, int) else None, float(loss))

    def scalar(self, tag: str, value: Any, step: int | None) -> None:
        if "loss" in tag.lower() and (not self._tag or tag == self._tag):
            self._tag = tag
            self.add("tensorboard", step, float(value))

    def save(self, path: Path, ended_well: bool) -> None:
        source = next((s for s in SOURCES if self.by_source.get(s)), "")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        result = {
            "source": source,
            "rows": self.by_source.get(source, []),
            "host_bytes": peak,
            "device_bytes": device_peak(),
            "ended_well": ended_well,
        }
        path.write_text(json.dumps(result))


def device_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


class Tee:
    """A text stream that also shows each line to the recorder."""

    def __init__(self, stream: TextIO, recorder: Recorder) -> None:
        self._stream, self._recorder, self._rest = stream, recorder, ""

    def write(self, text: str) -> int:
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            self._recorder.line(line)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
