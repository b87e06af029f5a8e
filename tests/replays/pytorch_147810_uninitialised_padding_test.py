"""pytorch 147810.

Fresh memory is filled with NaN (deterministic algorithms), shards are uneven, and replicas stand
beside shards: the padding of the reduction was read before anybody had written it. Right: no NaN in
gradients and weights, and the numbers of one process.
"""

from __future__ import annotations

import torch
from harness import run_ranks
from reference import assert_equal_training, assert_served, numbers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(numbers(1, 5, 3))
        self.down = nn.Parameter(numbers(2, 3, 5))
        self.shift = nn.Parameter(numbers(3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.up.t()) @ self.down.t() + self.shift


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(numbers(30 + 10 * step + rank, 4, 3)).square().mean()


def test_no_padding_is_read() -> None:
    def body(rank: int, size: int) -> None:
        assert torch.utils.deterministic.fill_uninitialized_memory
        torch.use_deterministic_algorithms(True)
        assert bool(torch.empty(8).isnan().all())
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(Odd(), mesh=mesh)
        assert_equal_training(model, Odd(), loss, steps=3)
        assert_served(model, groups=1)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        cast = sharded(Odd(), mesh=mesh, mp_policy=policy)
        for step in range(2):
            loss(cast, rank, step).backward()
            for parameter in cast.parameters():
                assert bool(parameter.grad.to_local().isfinite().all())
        assert_served(cast, groups=1)

    run_ranks(4, body)
