"""pytorch 162338, 162344.

On CPU the reduction summed where the mean was asked for, because the backend lacks averages. Right:
gradients 1 and 3 of two ranks give 2.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import reduce_scatter_list, run_ranks
from reference import assert_served, sharded
from torch import nn


def test_the_mean_of_one_and_three_is_two() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(3))

        def forward(self, factor: float) -> torch.Tensor:
            return (self.weight * factor).sum()

    def body(rank: int, size: int) -> None:
        model = sharded(Line())
        model(float(2 * rank + 1)).backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((3,), 2.0))
        assert_served(model, groups=1)

        shards = [torch.zeros(2)]
        inputs = [torch.full((4,), 2.0 * rank + 1)]
        reduce_scatter_list(shards, inputs, dist.ReduceOp.AVG).wait()
        assert shards[0].tolist() == [2.0, 2.0]

    run_ranks(2, body)
