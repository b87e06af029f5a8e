"""Dumps and `tide explain`: stories with a known culprit, and a launch whose rank really stops."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from tide import dumps
from tide.explain import words
from tide.fsdp.report import report
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.profiler import ProfilerActivity, profile


def call(sequence: int, state: str = "done", **more: Any) -> dict[str, Any]:
    base = {"sequence": sequence, "kind": "gather", "subject": "layers.3", "state": state}
    return {**base, "bytes": 8, "microseconds": 10, **more}


def records(*by_rank: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    ranks = len(by_rank)
    return [
        {
            "tide": 1,
            "rank": rank,
            "groups": [
                {"group": "0", "rank": rank, "ranks": ranks, "error": None, "operations": calls}
            ],
        }
        for rank, calls in enumerate(by_rank)
        if calls is not None
    ]


def waiting(sequence: int, peer: int) -> dict[str, Any]:
    text = f"gather {sequence} of 'layers.3', waiting for gather_arrival from rank {peer}"
    return call(sequence, "running", waiting=f"{text}, wanted 35, got 34")


@pytest.mark.parametrize(
    ("by_rank", "culprit", "said"),
    [
        # Everyone is in call 17, rank 2 never came to it.
        (([waiting(17, 2)], [waiting(17, 2)], [call(16)], [waiting(17, 2)]), 2, "everyone waited"),
        # Rank 0 waits for 1, which waits for 2: a chain ends at 2.
        (([waiting(17, 1)], [waiting(17, 2)], [call(16)]), 2, "its last call is number 16"),
        # No record of rank 1.
        (([waiting(17, 1)], None, [waiting(17, 1)]), 1, "left no record"),
        # A ring of waits: the rank that is furthest behind.
        (([waiting(17, 1)], [waiting(16, 0)]), 1, "its last call is number 16"),
        (([call(17)], [call(17)]), None, "nobody waits"),
    ],
)
def test_stories(by_rank: Any, culprit: int | None, said: str) -> None:
    (story,) = words.explain(records(*by_rank))
    assert story["culprit"] == culprit
    assert said in " ".join(story["sentences"])


def test_a_rank_that_is_usually_late() -> None:
    late = [call(i, waited_microseconds=900, longest_for_rank=1) for i in range(5)]
    (story,) = words.explain(records(late, [call(4)]))
    assert "was for rank 1" in story["sentences"][0]


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in made:
        fully_shard(layer)
    return fully_shard(made)


def test_a_rank_that_stops_is_named(tide, tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        trained = model()
        trained(torch.ones(2, 64)).sum().backward()
        if rank == 1:
            time.sleep(6)
            return
        with pytest.raises(dist.DistBackendError):
            trained(torch.ones(2, 64))

    prefix = str(tmp_path / "tide_trace_rank_")
    run_ranks(3, body, environment={"TIDE_DUMP": prefix}, group_timeout=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tide_trace_rank_0", "tide_trace_rank_2"]
    done = tide("explain", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "waited for rank 1, which left no record" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert json.loads(tide("explain", tmp_path, "--json").stdout)["groups"][0]["culprit"] == 1


def test_a_signal_dumps(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        trained = model()
        trained(torch.ones(2, 64))
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(0.01)  # the handler runs between bytecodes

    number = str(int(signal.SIGUSR2))
    prefix = str(tmp_path / "rank_")
    run_ranks(2, body, environment={"TIDE_DUMP": prefix, "TIDE_DUMP_SIGNAL": number})
    for rank in range(2):
        content = json.loads((tmp_path / f"rank_{rank}").read_text())
        assert content["why"] == "signal" and content["rank"] == rank
        assert content["groups"][0]["operations"][-1]["kind"] == "gather"


def test_files_lie_beside_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIDE_DUMP", raising=False)
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", "/var/traces/torch_rank_")
    assert dumps.path(3) == Path("/var/traces/tide_trace_rank_3")


@pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"[]", b'{"groups": 3}'])
def test_foreign_files(tide, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    done = tide("explain", "x")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_the_report_knows_who_was_late(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> Any:
        trained = model()
        for _ in range(3):
            if rank == 2:
                time.sleep(0.1)
            trained(torch.ones(2, 64)).sum().backward()
        found = report(trained)
        if rank == 0:
            found.html(tmp_path / "report.html")
        assert max(map(len, found.waits_table().splitlines())) <= 100
        return found.waits_dict()

    by_rank = run_ranks(3, body)
    for rank in (0, 1):
        rows = by_rank[rank]
        times = [sum(row["ranks"][peer] for row in rows) for peer in range(3)]
        assert max(range(3), key=times.__getitem__) == 2
        assert times[2] > 0.1  # slept three times 0.1 s, each rank waited for it
        for row in rows:
            assert sum(row["histogram"]) == row["waits"]
            assert sum(row["causes"].values()) == pytest.approx(row["seconds"])
            assert sum(row["ranks"]) == pytest.approx(row["seconds"])
    text = (tmp_path / "report.html").read_text()
    assert "<h1>tide.report" in text and "http" not in text


def test_the_profiler_shows_ranges_with_bytes() -> None:
    def body(rank: int, size: int) -> list[str]:
        trained = model()
        trained(torch.ones(2, 64)).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            trained(torch.ones(2, 64)).sum().backward()
        return sorted({e.name for e in profiler.events() if e.name.startswith("tide::")})

    names = run_ranks(2, body)[0]
    arriving = (64 * 64 + 64) * 4 // 2
    for layer in (0, 1):
        assert f"tide::gather {layer} {arriving} B" in names
        assert f"tide::reduce {layer} {arriving} B" in names
        assert f"tide::wait for gather {layer}" in names
