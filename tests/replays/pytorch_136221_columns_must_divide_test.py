"""pytorch 136221, VeOmni 1099.

Sharding along another dimension than the first works only where that dimension divides by the
ranks. Right: 10 columns on 4 ranks are refused with the dimension and the sizes; 12 columns give
the numbers of one process, on tide.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_equal_training, assert_served, numbers, sharded
from torch import nn
from torch.distributed.tensor import Shard


def build(columns: int) -> nn.Module:
    model = nn.Linear(columns, 8)
    with torch.no_grad():
        model.weight.copy_(numbers(4, 8, columns))
        model.bias.copy_(numbers(5, 8))
    return model


def by_columns(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1) if parameter.ndim > 1 else Shard(0)


def test_ten_columns_are_refused() -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(NotImplementedError, match=r"dim 1.*8, 10.*world size: 4"):
            sharded(build(10), shard_placement_fn=by_columns)

    run_ranks(4, body)


def test_twelve_columns_are_served() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(numbers(30 + rank + 10 * step, 5, 12)).square().mean()

    def body(rank: int, size: int) -> None:
        model = sharded(build(12), shard_placement_fn=by_columns)
        assert model.weight.to_local().shape == (8, 3)
        assert_equal_training(model, build(12), loss, steps=2)
        assert_served(model, groups=1)

    run_ranks(4, body)
