"""pytorch 132934 (130810), raylight 5.

A parameter without dimensions cannot be sharded by rows. Right: fully_shard says so; the same
parameter with one dimension works on 8 ranks, of which 7 hold no row.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_equal_training, assert_served, numbers, sharded
from torch import nn
from torch.distributed.fsdp import fully_shard


class Scaled(nn.Module):
    def __init__(self, gain: torch.Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(gain)
        self.matrix = nn.Parameter(numbers(3, 5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * (x @ self.matrix.t())


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(numbers(10 * step + rank, 6, 4)).square().mean()


def test_no_dimension_is_refused() -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(ValueError, match=r"scalar parameters.*gain"):
            fully_shard(Scaled(torch.tensor(1.0)))

    run_ranks(2, body)


def test_one_element_on_eight_ranks() -> None:
    def body(rank: int, size: int) -> None:
        model = sharded(Scaled(torch.ones(1)))
        assert model.gain.to_local().numel() == (1 if rank == 0 else 0)
        assert_equal_training(model, Scaled(torch.ones(1)), loss, steps=2)
        assert_served(model, groups=1)

    run_ranks(8, body, timeout=150, group_timeout=120)
