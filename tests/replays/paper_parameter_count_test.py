"""The limit of the paper's prototype, and of torch's own table of parameters in one all-gather.

Groups of 255, 256 and 257 parameters sat on both sides of a fixed table. Right: all are served, and
the numbers are those of one process.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_equal_training, assert_served, sharded
from torch import nn


class Gains(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.gains = nn.ParameterList(
            nn.Parameter(torch.arange(4.0) / 8 + index / 16) for index in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * gain for gain in self.gains])


@pytest.mark.parametrize("count", [255, 256, 257])
def test_both_sides_of_the_limit(count: int) -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(torch.full((4,), 1.0 + rank + step)).square().sum() / 64

    def body(rank: int, size: int) -> None:
        model = sharded(Gains(count))
        assert_equal_training(model, Gains(count), loss, steps=2)
        assert_served(model, groups=1)

    run_ranks(2, body, timeout=120)
