"""What every measurement of this folder keeps: the machine, versions, the command, and the numbers.

report = record.begin("what is measured")
report["rows"] = [...]
record.keep(report, folder / "name.json")
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

Report = dict[str, Any]
PICTURE_STYLE = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
SHADES = ["#00798c", "#edae49", "#d1495b", "#66a182", "#8d96a3"]


def begin(what: str) -> Report:
    """A report that names the machine, versions and command; the caller adds its numbers."""
    machine: Report = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        machine["gpu"] = properties.name
        machine["gpu_memory_gib"] = round(properties.total_memory / 2**30, 1)
        machine["multiprocessors"] = properties.multi_processor_count
        machine["cuda_driver"] = _driver()
    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else None
    return {
        "what": what,
        "command": shlex.join(["python3", *sys.argv]),
        "machine": machine,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, nccl)) if nccl else None,
        },
    }


def keep(report: Report, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    print(f"kept in {path.name}")


def note(report: Report) -> str:
    """The machine in one line, for pictures."""
    machine, versions = report["machine"], report["versions"]
    return f"{machine.get('gpu', machine['processor'])}; torch {versions['torch']}"


def times_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warm: int = 2
) -> list[float]:
    """How long each of `repeats` runs takes on the device, after `warm` that are not counted."""
    import time

    times = []
    for index in range(warm + repeats):
        if device.type == "cuda":
            begin_event = torch.cuda.Event(enable_timing=True)
            end_event = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            begin_event.record()
            run()
            end_event.record()
            torch.cuda.synchronize()
            took = float(begin_event.elapsed_time(end_event))
        else:
            start = time.perf_counter()
            run()
            took = (time.perf_counter() - start) * 1000
        if index >= warm:
            times.append(took)
    return times


def median_ms(
    run: Callable[[], object], device: torch.device, repeats: int, warm: int = 2
) -> float:
    return statistics.median(times_ms(run, device, repeats, warm))


def spread(samples: Sequence[float]) -> Report:
    return {
        "median": round(statistics.median(samples), 3),
        "least": round(min(samples), 3),
        "most": round(max(samples), 3),
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def _driver() -> str:
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word.count(".") == 2 and word[0].isdigit()), "unknown")
