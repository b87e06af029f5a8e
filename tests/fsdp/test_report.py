"""tide.report for people and for programs."""

from __future__ import annotations

import json
from typing import Any

from cases import by_block
from harness import run_ranks
from models import Model
from tide.fsdp.report import Report, Row
from trial import Case, Trainer


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "group": "layers.0",
        "process_group": "default_pg",
        "ranks": 4,
        "parameters": 9,
        "path": "tide",
        "gathered_bytes": 3 << 20,
        "reduced_bytes": 1536,
        "slot": "ring",
        "slot_bytes": 5 << 30,
        "staging": "leased",
        "memory": "in_place",
        "gathers": 20,
        "reduces": 10,
        "stock_calls": {},
        "reason": "",
    }
    return Row(**{**fields, **changes})


def test_it_fits_a_terminal_whatever_the_names() -> None:
    long = "model.decoder." + ".".join(f"very_long_name_{i}" for i in range(9))
    reason = "rank 11: " + "a reason that goes on " * 12
    rows = [row(), row(group=long, path="stock", slot="none", memory="", reason=reason)]
    text = str(Report(rows, 123))
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "3.0 MiB" in text and "1.5 KiB" in text and "5.0 GiB" in text
    assert "very_long_name_8" in text and "1 of 2 groups on tide" in text


def test_it_says_whether_multicast_is_used_or_why_not() -> None:
    why = "rank 3: NVLink multicast is off: NCCL_NVLS_ENABLE=0"
    text = str(Report([row()], 1, {"default_pg": why, "other": ""}))
    assert f"gathers of 'default_pg' go to each peer in turn: {why}" in " ".join(text.split())
    assert "gathers of 'other' are one store to all (multicast)" in text
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "gathers of" not in str(Report([row()], 1))
    assert Report([row()], 1, {"other": ""}).to_dict()["no_multicast"] == {"other": ""}


def test_a_reason_is_said_once_and_counted() -> None:
    rows = [row(group=f"layers.{i}", stock_calls={"gather: no slot was free": 2}) for i in range(3)]
    text = str(Report(rows, 0))
    assert text.count("no slot was free") == 1 and "(6 calls)" in text


def test_programs_read_it_and_ranks_agree() -> None:
    case = Case(Model, by_block, steps=2)

    def body(rank: int, size: int) -> tuple[Any, str]:
        report = Trainer(case, "tide").run().report
        assert report is not None
        return json.loads(json.dumps(report.to_dict())), str(report)

    results = run_ranks(3, body)
    assert all(result == results[0] for result in results)
    rows = results[0][0]["rows"]
    assert [r["group"] for r in rows] == ["root", *(f"blocks.{i}" for i in range(4))]
    block = rows[1]
    # Rows of 24, 24, 37 x 24, 37, 24 x 37, 24 and 1, over 3 ranks without padding; 4 bytes each.
    whole = (24 + 24 + 37 * 24 + 37 + 24 * 37 + 24 + 1) * 4
    assert block["gathered_bytes"] == whole * 2 * 2 // 3  # of two ranks, forward and backward
    assert block["reduced_bytes"] == whole * 2 // 3
    assert (block["gathers"], block["reduces"], rows[0]["gathers"]) == (4, 2, 2)
    assert results[0][0]["arena_bytes"] > 0
