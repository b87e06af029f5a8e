"""No layout copies: what torch's profiler sees in one training step, and what tide counts
itself."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from typing import Any

import pytest
import tide
import torch.distributed as dist
from cases import CASES
from harness import run_ranks
from models import Model
from tide.fsdp.plan import groups_of
from tide.fsdp.record import record_of
from torch.profiler import ProfilerActivity, profile, record_function
from trial import Case, Trainer, plain_step

COPIES = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")


ENGINES = ("stock", "tide", "tide:fsdp=gather", "tide:fsdp=reduce")


def operators_of_a_step(case: Case) -> dict[str, Counter[str]]:
    """Engine -> operators that rank 0's profiler sees in the second step."""
    trainers = {engine: Trainer(case, engine) for engine in ENGINES}
    for trainer in trainers.values():
        plain_step(trainer, 0)
    watch = dist.get_rank() == 0
    with profile(activities=[ProfilerActivity.CPU]) if watch else nullcontext() as profiler:
        for engine, trainer in trainers.items():
            with record_function(f"engine {engine}"):
                plain_step(trainer, 1)
    found: dict[str, Counter[str]] = {engine: Counter() for engine in ENGINES}
    if profiler is not None:
        events = list(profiler.events())
        spans = {e.name[7:]: e.time_range for e in events if e.name.startswith("engine ")}
        for event in events:
            for engine, span in spans.items():
                if span.start <= event.time_range.start <= span.end:
                    found[engine][event.name] += 1
    return found


@pytest.mark.parametrize("name", ["fp32", "masters", "columns", "frozen", "hsdp", "nested"])
def test_a_step_on_tide_has_no_layout_copies(name: str) -> None:
    """Stock has all three kinds in the same profile, each direction alone leaves the other's."""
    case = CASES[name]
    operators = run_ranks(case.ranks, lambda rank, size: operators_of_a_step(case), timeout=120)[0]
    copies = {
        engine: {copy for copy in COPIES if any(copy in name for name in names)}
        for engine, names in operators.items()
    }
    assert copies["stock"] == set(COPIES)
    assert copies["tide"] == set()
    assert copies["tide:fsdp=gather"] == {"chunk_cat"}
    assert copies["tide:fsdp=reduce"] == {"all_gather_copy_in", "split_with_sizes_copy"}
    if name == "columns":
        # Stock concatenates the chunks of what is sharded by columns, in both directions.
        assert operators["tide"]["aten::cat"] < operators["stock"]["aten::cat"]
        assert operators["tide"]["aten::chunk"] < operators["stock"]["aten::chunk"]


@pytest.mark.parametrize(("name", "mode"), [("bf16", "in_place"), ("masters", "in_place")])
def test_bytes_of_a_step_are_the_minimum(name: str, mode: str) -> None:
    """Each rank pushes each of its shards once to every peer, for forward and backward, and each
    slice of its gradients once to its owner; beside that it copies its own shard (or casts it) and
    no more."""
    case = CASES[name]

    def body(rank: int, size: int) -> Any:
        trainer = Trainer(case, f"tide:memory_mode={mode}")
        plain_step(trainer, 0)
        record = record_of(groups_of(trainer.model._get_fsdp_state())[0])
        assert record is not None and record.gather_backend is not None
        before = record.gather_backend.counters()
        plain_step(trainer, 1)
        after = record.gather_backend.counters()
        used = {key: after[key] - before[key] for key in ("bytes_pushed", "bytes_copied")}
        return used, tide.report(trainer.model)

    results = run_ranks(4, body)
    pushed = sum(used["bytes_pushed"] for used, _ in results)
    rows = results[0][1].rows
    whole = sum(p.numel() for p in Model().parameters()) * 2
    root = sum(p.numel() for m in (Model().embedding, Model().head) for p in m.parameters()) * 2
    least = 3 * (2 * whole - root) + 3 * whole
    assert pushed == least, (pushed, least)
    told = 4 * sum(row.gathered_bytes + row.reduced_bytes for row in rows)
    assert pushed - 8 * len(rows) < told <= pushed  # the mean over the ranks is rounded down
    own = sum(used["bytes_copied"] for used, _ in results)
    shards = sum(row.gathered_bytes for row in rows) * 4 // 3
    assert own <= shards, (own, shards)
