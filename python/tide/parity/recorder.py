"""What one rank of a run remembers: its losses with their times, and its peak memory.

Losses come from a line with "loss" in it (and, where it says so, "step"), from a JSON line that is
printed or written to a file *.jsonl, from TensorBoard's add_scalar, or from `tide.parity.log(step,
loss)`; the most explicit source that spoke wins. Losses of a validation are left out.
"""

from __future__ import annotations

import json
import re
import resource
import time
from pathlib import Path
from typing import Any, TextIO

NUMBER = r"([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|nan\b|inf(?:inity)?\b))"
STEP = re.compile(r"\b(?:step|iter(?:ation)?)\b\W{0,3}(\d+)", re.IGNORECASE)
LOSS = re.compile(r"\b(?:train[_ ])?loss\b[\"']?\s*[:=,]?\s*" + NUMBER, re.IGNORECASE)
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
SOURCES = ("callback", "tensorboard", "json", "text")
"""The most explicit first."""


class Recorder:
    def __init__(self) -> None:
        self.by_source: dict[str, list[tuple[int, float, float]]] = {}  # step, loss, time
        self.streams: list[Lines] = []
        self._tag = ""

    def add(self, source: str, step: int | None, loss: float) -> None:
        rows = self.by_source.setdefault(source, [])
        at = step if step is not None else len(rows)
        if not (rows and rows[-1][0] == at):
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
        for found in LOSS.finditer(text):
            if last_word(text[: found.start()]) not in VALIDATION:
                step = STEP.search(text)
                self.add("text", int(step.group(1)) if step else None, float(found.group(1)))
                return

    def values(self, values: dict[str, Any]) -> None:
        loss = next((values[k] for k in ("loss", "train_loss", "train/loss") if k in values), None)
        step = next((values[k] for k in ("step", "iteration", "iter") if k in values), None)
        if isinstance(loss, int | float):
            self.add("json", step if isinstance(step, int) else None, float(loss))

    def scalar(self, tag: str, value: Any, step: int | None) -> None:
        words = re.split(r"[^a-z]+", tag.lower())
        if any(word in VALIDATION for word in words):
            return
        if "loss" in tag.lower() and (not self._tag or tag == self._tag):
            self._tag = tag
            self.add("tensorboard", step, float(value))

    def save(self, path: Path, ended_well: bool) -> None:
        for stream in self.streams:
            stream.add("\n")
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


def last_word(text: str) -> str:
    return re.split(r"[^a-z]+", text.lower().rstrip(" _/-"))[-1]


def device_peak() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0


class Lines:
    """Cuts what is written to a stream into lines and shows each to the recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder, self._rest = recorder, ""
        recorder.streams.append(self)

    def add(self, text: str) -> None:
        *lines, self._rest = re.split(r"[\r\n]", self._rest + text)
        for line in lines:
            self._recorder.line(line)


class Tee:
    """A text stream that also shows each line to the recorder."""

    def __init__(self, stream: TextIO, recorder: Recorder) -> None:
        self._stream, self._lines = stream, Lines(recorder)

    def write(self, text: str) -> int:
        self._lines.add(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def listen(file: Any, recorder: Recorder) -> None:
    """Shows the recorder the lines that are written to an open file from now on."""
    lines, write = Lines(recorder), file.write

    def told(content: Any) -> Any:
        lines.add(content if isinstance(content, str) else bytes(content).decode(errors="replace"))
        return write(content)

    file.write = told
