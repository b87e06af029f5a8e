"""tt-metal 36749 and 37884, pytorch 137529.

Eight ranks reduce bf16 numbers: one sends 256, seven send 1. Where every addition is rounded to
bf16 the ones vanish and 256 comes out. Right: 263, rounded once where the output is bf16.
"""

from __future__ import annotations

import tide
import torch
from harness import reduce_scatter_list, run_ranks
from reference import assert_served, sharded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

RANKS = 8


def contribution(rank: int, numel: int) -> torch.Tensor:
    return torch.full((numel,), 256.0 if rank == 3 else 1.0, dtype=torch.bfloat16)


def test_bf16_additions_lose_the_ones() -> None:
    total = contribution(3, 1)
    for rank in (0, 1, 2, 4, 5, 6, 7):
        total = total + contribution(rank, 1)
    assert total.item() == 256.0


def test_tide_keeps_them() -> None:
    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(40))

        def forward(self, factor: torch.Tensor) -> torch.Tensor:
            return (self.weight * factor).sum()

    def body(rank: int, size: int) -> None:
        whole = contribution(rank, 8 * size)
        flat = torch.zeros(8)
        layout = tide.GroupLayout.of([whole.shape], [0])
        layout.reduce_scatter(flat, [whole])
        assert flat.tolist() == [263.0] * 8

        shards = [torch.zeros(8, dtype=torch.bfloat16)]
        reduce_scatter_list(shards, [whole]).wait()
        assert torch.equal(shards[0], torch.full((8,), 263.0).to(torch.bfloat16))
        assert shards[0][0].item() != 256.0

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(Line(), mp_policy=policy)
        model(contribution(rank, 1)).backward()
        assert torch.equal(model.weight.grad.full_tensor(), torch.full((40,), 263 / 8))
        assert_served(model, groups=1)

    run_ranks(RANKS, body, timeout=150, group_timeout=120)
