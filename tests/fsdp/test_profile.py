"""No layout copies: what torch's profiler sees in one training step, and what tide counts
itself."""

from __future__ import annotations

from typing import Any

import pytest
import tide
from cases import CASES
from harness import run_ranks
from models import Model
from tide.fsdp.record import record_of
from torch.profiler import ProfilerActivity, profile
from trial import Trainer, plain_step

COPIES = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")


def copies_of_a_step(trainer: Trainer) -> set[str]:
    plain_step(trainer, 0)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        plain_step(trainer, 1)
    names = {event.key for event in profiler.key_averages()}
    return {copy for copy in COPIES if any(copy in name for name in names)}


@pytest.mark.parametrize("name", ["fp32", "bf16", "masters", "columns", "frozen", "hsdp", "nested"])
def test_a_step_on_tide_has_no_layout_copies(name: str) -> None:
    """Stock has all three kinds in the same profile, each direction alone leaves the other's."""
    case = CASES[name]

    def body(rank: int, size: int) -> dict[str, set[str]]:
        engines = ("stock", "tide", "tide:fsdp=gather", "tide:fsdp=reduce")
        return {engine: copies_of_a_step(Trainer(case, engine)) for engine in engines}

    for copies in run_ranks(case.ranks, body, timeout=120):
        assert copies["stock"] == set(COPIES)
        assert copies["tide"] == set()
        assert copies["tide:fsdp=gather"] == {"chunk_cat"}
        assert copies["tide:fsdp=reduce"] == {"all_gather_copy_in", "split_with_sizes_copy"}


def test_columns_are_not_reordered_by_torch() -> None:
    """Stock concatenates the chunks of gradients and parameters sharded by columns; nothing does
    here."""

    def body(rank: int, size: int) -> list[int]:
        counts = []
        for engine in ("stock", "tide"):
            trainer = Trainer(CASES["columns"], engine)
            plain_step(trainer, 0)
            with profile(activities=[ProfilerActivity.CPU]) as profiler:
                plain_step(trainer, 1)
            events = {event.key: event.count for event in profiler.key_averages()}
            counts.append(events.get("aten::cat", 0))
        return counts

    for stock, ours in run_ranks(4, body):
        assert ours < stock


@pytest.mark.parametrize(("name", "mode"), [("bf16", "in_place"), ("masters", "in_place")])
def test_bytes_of_a_step_are_the_minimum(name: str, mode: str) -> None:
    """Each rank pushes each of its shards once to every peer, for forward and backward, and each
    slice of its gradients once to its owner; beside that it copies its own shard (or casts it) and
    no more."""
    case = CASES[name]

    def body(rank: int, size: int) -> Any:
        trainer = Trainer(case, f"tide:memory_mode={mode}")
        plain_step(trainer, 0)
        record = record_of(trainer.model._get_fsdp_state()._fsdp_param_groups[0])
        assert record is not None and record.gather_backend is not None
        before = record.gather_backend.counters()
        plain_step(trainer, 1)
        after = record.gather_backend.counters()
        used = {key: after[key] - before[key] for key in ("bytes_pushed", "bytes_copied")}
        return used, tide.report(trainer.model)

    results = run_ranks(4, body)
    pushed = sum(used["bytes_pushed"] for used, _ in results)
    rows = results[0][1].rows
    # The report counts padded shards; what has no rows need not move.
    most = 4 * sum(row.gathered_bytes + row.reduced_bytes for row in rows)
    whole = sum(p.numel() for p in Model().parameters()) * 2
    root = sum(p.numel() for m in (Model().embedding, Model().head) for p in m.parameters()) * 2
    least = 3 * (2 * whole - root) + 3 * whole
    assert least <= pushed <= most, (least, pushed, most)
    own = sum(used["bytes_copied"] for used, _ in results)
    assert own <= 2 * whole - root, (own, 2 * whole - root)
