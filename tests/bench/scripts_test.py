"""The measurements that a GPU is needed for, run once on the CPU with small sizes: they end well
and keep whole numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent


def run(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(BENCH / f"{script}.py"), "--out", str(folder), "--tiny", *arguments],
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report: dict[str, Any] = json.loads((folder / f"{script}.json").read_text())
    assert report["machine"] and report["versions"] and script in report["command"]
    return report


def test_small_pieces(tmp_path: Path) -> None:
    report = run("small_pieces", tmp_path, "--ranks", "2", "--repeats", "2")
    assert [(row["group"], row["direction"]) for row in report["rows"]] == [
        (group, direction)
        for group in ("experts", "small tensors")
        for direction in ("gather", "reduce")
    ]
    for row in report["rows"]:
        for way in ("stock", "stock's copies", "tide"):
            assert 0 < row[way]["host"] <= row[way]["most"]
