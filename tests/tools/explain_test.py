"""Dumps and `tide explain`: stories with a known culprit, and a launch whose rank really stops."""

from __future__ import annotations

import json
import os
import signal
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from tide import dumps
from tide.explain import words
from tide.fsdp import steps
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


def over_rails(sequence: int, node: int, rank: int) -> dict[str, Any]:
    what = f"grant of round 0, part 0 from node {node} (rank {rank}), wanted 1, got 0"
    return call(sequence, "running", waiting=f"gather {sequence} of 'layers.3', waiting for {what}")


def failed(sequence: int, error: str) -> dict[str, Any]:
    return call(sequence, "failed", error=f"peer lost: group '0', {error}")


ENDED = (
    "gather_credit from rank 2, wanted 5, got 4: rank 0 of group '0': rank 1 (process 27158) ended"
)
REPORTED = (
    f"rank 0 failed while in gather 7: rank 0 reported: peer lost: group '0', rank 0: {ENDED}"
)


@pytest.mark.parametrize(
    ("by_rank", "culprit", "said"),
    [
        # Two nodes of two: rank 3 waits over its rail for rank 1, and the others for those two.
        (
            ([waiting(17, 1)], [call(16)], [waiting(17, 3)], [over_rails(17, 0, 1)]),
            1,
            "everyone waited for rank 1: its last call is number 16",
        ),
        # Who ended is to blame, not who was waited for; a peer's words are not repeated.
        (
            ([failed(7, f"rank 0: {ENDED}")], None, [failed(7, f"rank 2: {REPORTED}")]),
            1,
            "rank 2: gather 7 of 'layers.3', failed after 10 us: peer lost: group '0', rank 2: "
            "rank 0 failed while in gather 7: rank 0 reported it",
        ),
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


class Page(HTMLParser):
    """What a page asks a browser to fetch, its headings, and the rows of each table."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.headings: list[str] = []
        self.rows: list[int] = []
        self._in_heading = False

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.addresses += [value or "" for name, value in attributes if name in ("src", "href")]
        if tag == "table":
            self.rows.append(0)
        elif tag == "tr":
            self.rows[-1] += 1
        self._in_heading = tag in ("h1", "h2")

    def handle_data(self, data: str) -> None:
        if self._in_heading:
            self.headings.append(data)
            self._in_heading = False


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
        for table in (found.waits_table(), found.steps_table()):
            assert max(map(len, table.splitlines())) <= 100
        # Before the first step ranks meet to plan, and the late one is not late any more.
        assert len(found.steps) == 3
        assert [one.latest for one in found.steps[1:]] == [2] * 2 or rank == 2
        assert sum(one.calls for one in found.steps) == sum(r.gathers + r.reduces for r in found)
        waited = sum(one.waited for one in found.steps)
        assert waited <= sum(row.seconds for row in found.waits) * 1.01
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
    page = (tmp_path / "report.html").read_text()
    shown = Page()
    shown.feed(page)
    assert shown.addresses == []  # a browser asks nobody for anything
    assert "http" not in page and "url(" not in page and "@import" not in page
    assert shown.headings == [
        "tide.report",
        "Waits of this rank",
        "Last steps of this rank, the newest last",
    ]
    assert shown.rows == [1 + 2, 1 + 4, 1 + 3]  # heads, groups, directions, steps


@pytest.mark.parametrize(
    ("text", "whole", "lengths"),
    [
        ("ga gb gb rb ga ra ga gb gb rb ga ra ga gb", True, [6, 6]),
        # The beginning is lost: from the first whole step on.
        ("rb ga ra ga gb gb rb ga ra ga gb gb rb ga ra", False, [6, 6]),
        ("ra ga gb gb rb ga ra ga gb gb rb", False, [6]),
        # Group b takes no part in the second step.
        ("ga gb gb rb ga ra ga ga ra ga gb gb rb ga ra", True, [6, 3, 6]),
        # Parameters that stay unsharded in between, and a backward without reduces before one with.
        ("ga gb rb ra ga gb rb ra", True, [4, 4]),
        ("ga gb gb ga ga gb gb rb ga ra ga gb gb ga ga gb gb rb ga ra", True, [10, 10]),
        ("rb ra rb ra", True, [2, 2]),
        ("ga ga ra", True, [3]),
        ("ga gb", True, []),
        ("", True, []),
    ],
)
def test_steps_end_with_the_reduce_that_a_forward_follows(
    text: str, whole: bool, lengths: list[int]
) -> None:
    kinds = {"g": "gather", "r": "reduce"}
    words = text.split()
    calls = [call(i, kind=kinds[w[0]], subject=f"'{w[1]}'") for i, w in enumerate(words)]
    assert [len(one) for one in steps.cut(calls, whole)] == lengths


def test_a_step_tells_whom_it_waited_for() -> None:
    waits = [
        call(0, waited_microseconds=5, longest_for_rank=1),
        call(1, subject="'b'", waited_microseconds=20, longest_for_rank=2),
        call(2, subject="'b'"),
        call(3, subject="'c'", waited_microseconds=10, longest_for_rank=2),
    ]
    found = steps.step("0", waits)
    assert (found.calls, found.latest, found.slowest) == (4, 2, "b")
    assert found.waited == pytest.approx(35e-6)
    assert found.ranks == {1: pytest.approx(5e-6), 2: pytest.approx(30e-6)}
    assert "2 (86%)" in steps.table([found])
    assert steps.step("0", [call(0)]).latest is None


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
