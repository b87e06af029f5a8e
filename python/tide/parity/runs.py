"""Starts the runs of `tide parity` one after another, and keeps what ended."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from tide import look
from tide.parity import compare

STOCK_FOR_TIDE = "cpu:gloo,cuda:nccl"
Json = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    script: Path
    arguments: tuple[str, ...]
    ranks: int
    stock: str
    also: str
    seed: int
    out: Path
    again: bool = False  # runs that ended are repeated

    def settings(self, name: str) -> Json:
        backend = {"tide": "tide", self.also: self.also}.get(name, self.stock)
        symmetric = bool(self.also) and name == self.also == "symmmem"
        return {
            "backend": "" if symmetric else backend,
            "stock": self.stock or STOCK_FOR_TIDE,
            "seed": self.seed,
            "reordered": name == "stock, reordered",
            "symmetric": symmetric,
        }

    def key(self, name: str) -> str:
        """Changes with the script (not with what it imports), its arguments, the settings, tide's
        variables, and the versions of torch and tide."""
        parts = [self.script.read_bytes().decode(errors="replace"), self.arguments, self.ranks]
        variables = sorted(one for one in os.environ.items() if one[0].startswith("TIDE_"))
        versions = [version(package) for package in ("torch", "tide")]
        told = repr([*parts, self.settings(name), variables, versions])
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def kept(self, name: str, path: Path) -> Json | None:
        """The result of a run that ended before, if this one would be the same."""
        try:
            result: Json = json.loads(path.read_text())
            same = result["key"] == self.key(name) and bool(result["losses"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return result if same and not self.again else None


def everything(plan: Plan) -> tuple[dict[str, Json], list[str]]:
    """Name of a run -> its result (kept ones are read), and why a run that is not needed for a
    verdict has none."""
    found = {name: one(plan, name) for name in ("stock 1", "stock 2", "tide")}
    failures = []
    equal = losses(found["stock 1"]) == losses(found["stock 2"])
    for name in (*(("stock, reordered",) if equal else ()), *((plan.also,) if plan.also else ())):
        try:
            found[name] = one(plan, name)
        except look.BadInput as error:
            failures.append(error.message)
    return found, failures


def losses(result: Json) -> compare.Losses:
    return {int(step): loss for step, loss in result["losses"]}


def one(plan: Plan, name: str) -> Json:
    folder = plan.out / name.replace(",", "").replace(" ", "-").replace(":", "-")
    kept = folder / "result.json"
    before = plan.kept(name, kept)
    if before is not None:
        return before
    look.folder(folder)
    for old in folder.glob("rank.*.json"):
        old.unlink()
    log = folder / "log"
    program = look.torchrun(plan.ranks, "-m", "tide.parity.rank", json.dumps(plan.settings(name)))
    program += [str(folder.resolve()), str(plan.script)]
    variables = {"PYTHONHASHSEED": str(plan.seed), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    start = time.monotonic()
    with look.progress(name) as shown:
        with look.Child([*program, *plan.arguments], variables, log) as child:
            while (status := child.wait(0.2)) is None:
                shown.update(note=last_line(log))
    if status != 0:
        raise look.BadInput(f"run '{name}' ended with {status}: {cause(log)} (whole log: {log})")
    result = gathered(folder, name, time.monotonic() - start)
    result["key"] = plan.key(name)
    partial = folder / "result.partial"
    partial.write_text(json.dumps(result))
    partial.replace(kept)
    return result


def last_line(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 400))
        lines = file.read().decode(errors="replace").split("\n")
    return next((line.strip()[:60] for line in reversed(lines) if line.strip()), "")


def cause(log: Path) -> str:
    """The first error of a rank."""
    for line in log.read_text(errors="replace").splitlines():
        text = line.split("]: ", 1)[-1].strip()
        if text.split(":", 1)[0].rsplit(".", 1)[-1].endswith(("Error", "Exception", "Interrupt")):
            return text[:300]
    return last_line(log)


def gathered(folder: Path, name: str, seconds: float) -> Json:
    ranks = [json.loads(p.read_text()) for p in sorted(folder.glob("rank.*.json"))]
    speaking = next((rank for rank in ranks if rank["rows"]), None)
    if speaking is None:
        raise look.BadInput(
            f"run '{name}' logged no loss: print 'step N loss X', write JSON lines, use "
            "TensorBoard, or call tide.parity.log(step, loss)"
        )
    rows = speaking["rows"]
    pace = [(b[2] - a[2]) / max(1, b[0] - a[0]) for a, b in pairwise(rows)]
    return {
        "name": name,
        "source": speaking["source"],
        "losses": [(step, loss) for step, loss, _ in rows],
        "step_seconds": median(pace[len(pace) // 10 :]) if pace else 0.0,
        "host_bytes": max(rank["host_bytes"] for rank in ranks),
        "device_bytes": max(rank["device_bytes"] for rank in ranks),
        "seconds": seconds,
    }
