"""pytorch 156784.

One group holds bf16 and fp32 parameters. Right: it is either refused in words, or served with each
parameter gathered in its own dtype and each gradient right; nothing is cast in silence. With fp32
reductions the bf16 parameter's sum keeps ones beside 256.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import run_ranks
from reference import sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

VALUE = 1 + 2.0**-20  # fp32 only: rounds to 1 in bf16


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.full((5, 2), 1.0, dtype=torch.bfloat16))
        self.large = nn.Parameter(torch.full((3, 2), VALUE))

    def forward(self, factor: float) -> torch.Tensor:
        self.seen = (self.small.dtype, self.large.dtype, bool((self.large == VALUE).all()))
        return (self.small * factor).sum().float() + (self.large * factor).sum()


def outcome(backend: str, rank: int) -> Any:
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("x",), backend_override={"x": backend}
    )
    model = sharded(Two(), mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    try:
        model(256.0 if rank == 0 else 1.0).backward()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    assert model.seen == (torch.bfloat16, torch.float32, True)
    return model.small.grad.full_tensor(), model.large.grad.full_tensor()


def test_each_dtype_is_kept_or_the_group_refused() -> None:
    def body(rank: int, size: int) -> None:
        stock, ours = outcome("gloo", rank), outcome("tide", rank)
        if isinstance(stock, str):
            assert ours == stock and "dtype" in ours, (stock, ours)
            return
        small, large = ours
        assert small.dtype == torch.bfloat16 and large.dtype == torch.float32
        # 259 / 4, rounded once to bf16, which has 8 bits.
        assert torch.equal(small, torch.full((5, 2), 259 / 4).to(torch.bfloat16))
        assert torch.equal(large, torch.full((3, 2), 259 / 4))

    run_ranks(4, body)
