"""How many slots the order of FSDP2's calls needs: worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import by_block, nested, prefetching, several_modules, tied
from harness import run_ranks
from models import Model
from tide.fsdp.depth import prefetch_depth
from tide.fsdp.plan import groups_of
from trial import Setting


def stays(model: Any, setting: Setting) -> None:
    by_block(model, setting, reshard_after_forward=False)


@pytest.mark.parametrize(
    ("shard", "depth"),
    [
        (by_block, 1),  # a block, and the next one
        (nested, 2),  # a block, one of its layers, and the next
        (tied, 2),  # embedding and head from first to last, a block, and the next
        (several_modules, 1),  # a pair of blocks, and the next pair
        (prefetching, 2),  # a block, and two more
        (stays, 1),  # no group of the ring: the least
    ],
)
def test_depth(shard: Any, depth: int) -> None:
    def body(rank: int, size: int) -> int:
        model: Any = Model()
        shard(model, Setting("stock"))
        model(torch.zeros(1, 2, dtype=torch.int64))
        state = model._get_fsdp_state()
        states = list(dict.fromkeys(state._state_ctx.all_states))
        return prefetch_depth(state, states, groups_of)

    assert run_ranks(2, body, backend="gloo") == [depth] * 2
