"""pytorch 186998, 187376.

All parameters are frozen in the first forward and trained afterwards, with a policy that gathers
bf16 and reduces fp32; there the reduction ran in bf16. Right: sums and gradients are fp32. Rank 0
sends 256 and the others 1: a sum in bf16 would lose the ones.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_served, sharded
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return (self.weight * factor).sum()


@pytest.mark.skipif(
    torch.__version__ < "2.14", reason="stock FSDP2 of torch 2.11 raises in this backward"
)
def test_reductions_are_fp32() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def body(rank: int, size: int) -> None:
        model = Weighted()
        sharded(model, mp_policy=policy, reshard_after_forward=True)
        factor = torch.tensor(256.0 if rank == 0 else 1.0)
        model.requires_grad_(False)
        model(factor)
        model.requires_grad_(True)
        for _ in range(2):
            model.zero_grad()
            model(factor).backward()
            gradient = model.weight.grad
            assert gradient.dtype == torch.float32
            # 259 needs 9 bits: not a bf16 number.
            assert torch.equal(gradient.full_tensor(), torch.full((6, 3), 259 / 4))
        assert_served(model, groups=1)

    run_ranks(4, body)
