"""Models that end before their process group: their slots serve others, their memory goes."""

from __future__ import annotations

import gc
from typing import Any

import tide
import torch
from harness import run_ranks
from steps import build, step, words
from tide import _C, groups
from torch.distributed.fsdp import fully_shard


def arena_bytes() -> int:
    backend = groups.of()
    assert backend is not None
    return backend.counters()["arena_bytes"]


class Wide(torch.nn.Module):
    """Blocks of `width` under a root with parameters of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(64, width)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(words)
        for block in self.blocks:
            x = block(x).relu()
        return x


def wide(width: int) -> Any:
    torch.manual_seed(0)
    model: Any = Wide(width)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def test_models_made_and_deleted_in_turn_hold_no_more_than_the_largest() -> None:
    """Beside a model that lives on; garbage is collected by planning alone."""

    def body(rank: int, size: int) -> Any:
        alive = wide(32)
        alive(words()).sum().backward()
        largest = wide(160)
        largest(words()).sum().backward()
        limit = arena_bytes()
        del largest
        gc.disable()
        held = []
        for turn in range(20):
            model = wide(32 * (1 + turn * 3 % 5))
            model(words()).sum().backward()
            assert all(row.path == "tide" and not row.stock_calls for row in tide.report(model))
            held.append(arena_bytes())
            del model
            alive(words()).sum().backward()
        gc.enable()
        assert not any(row.stock_calls for row in tide.report(alive))
        assert tide.report(alive).arena_bytes == arena_bytes()
        return limit, held

    for limit, held in run_ranks(3, body):
        assert max(held) <= limit, (limit, held)


def test_a_model_that_dies_unsharded_leaves_no_slot_behind() -> None:
    """It held every slot of the ring; the next gather of a living model finds one all the same."""

    def body(rank: int, size: int) -> bool:
        alive = build()
        expected = step(alive)
        for _ in range(4):
            dies = build()
            step(dies)
            for block in dies.blocks:
                block.unshard()
            del dies, block
            gc.collect()
            assert step(alive) == expected
        assert not any(row.stock_calls for row in tide.report(alive))
        return True

    assert all(run_ranks(2, body))


def test_an_unsharded_parameter_outlives_its_model_and_its_slot() -> None:
    """One rank keeps a parameter of a deleted model: no later gather of any model touches it."""

    def body(rank: int, size: int) -> bool:
        alive = build()
        expected = step(alive)
        dies = build()
        step(dies)
        dies.blocks[0].unshard()
        kept = dies.blocks[0].up.weight if rank == 1 else None
        before = kept.detach().clone() if kept is not None else None
        assert rank != 1 or _C.storage_is_bound(kept)
        del dies
        gc.collect()
        for turn in range(3):
            model = wide(64 + turn)
            model(words()).sum().backward()
            del model
            assert step(alive) == expected
        assert rank != 1 or torch.equal(kept.detach(), before)
        del kept
        gc.collect()
        assert step(alive) == expected
        return True

    assert all(run_ranks(2, body))
