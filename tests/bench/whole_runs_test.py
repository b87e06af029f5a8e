"""`tide bench` and the demonstration, whole and small: what they write is complete and right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PNG = b"\x89PNG\r\n\x1a\n"


def run(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_bench_of_the_collectives(tmp_path: Path) -> None:
    small = ["--ranks", "2", "--repetitions", "2", "--operation-mib", "1", "--path-mib", "1"]
    cases = ["--case", "gather", "--case", "reduce", "--case", "path"]
    out = run("-m", "tide.cli", "bench", *small, *cases, "--out", "small", folder=tmp_path)
    report = json.loads((tmp_path / "small.json").read_text())
    assert report["versions"]["torch"].split(".")[0] == "2"
    assert report["machine"]["cores"] >= 1
    assert "bench --ranks 2" in report["command"]
    result = report["ranks"]["2"]
    for case in ("gather", "reduce"):
        assert result[case]["written_bytes"] == result[case]["least_bytes"]
        for name in ("gloo", "tide", "memcpy"):
            assert len(result[case]["samples"][name]["samples_ms"]) == 2
    for direction in ("unshard", "post_backward"):
        assert set(result["path"][direction]) == {"gloo", "tide"}
    assert (tmp_path / "small.png").read_bytes().startswith(PNG)
    assert "coalesced all-gather" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.timeout(300)
def test_bench_of_memory(tmp_path: Path) -> None:
    small = ["--ranks", "2", "--seconds", "1", "--case", "memory", "--out", "small"]
    out = run("-m", "tide.cli", "bench", *small, "--json", folder=tmp_path)
    report = json.loads(out)
    assert report == json.loads((tmp_path / "small.json").read_text())
    memory = report["ranks"]["2"]["memory"]
    for backend in ("gloo", "tide"):
        assert memory[backend]["steps"] >= 1
        assert memory[backend]["readings"] >= 1
        # Two processes with torch in them hold more than 100 MiB and less than this machine.
        assert 100 < memory[backend]["peak_pss_mib"] < 50_000


@pytest.mark.timeout(300)
def test_demonstration(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    small = ["--steps", "4", "--layers", "2", "--width", "64", "--letters", "5"]
    out = run(*launch, "-m", "tide.demo", *small, folder=tmp_path)
    assert (tmp_path / "tide-demo.png").read_bytes().startswith(PNG)
    cells = [[cell.strip() for cell in line.split("│")] for line in out.splitlines()]
    rows = {row[1]: row[2:] for row in cells if len(row) > 3}
    for step in range(4):
        gloo, tide = float(rows[str(step)][0]), float(rows[str(step)][1])
        assert abs(gloo - tide) < 2e-3, out
    for copy in ("split_with_sizes_copy", "chunk_cat", "all_gather_copy_in"):
        assert int(rows[f"copies, {copy}"][0]) > 0
        assert rows[f"copies, {copy}"][1] == "0"
    assert rows["sent to other ranks"][1] == rows["the least possible"][1]
    assert "3 of 3 groups on tide" in out
    assert "def main(arguments):" in out
