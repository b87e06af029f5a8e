"""pytorch 125484, cosmos-framework 162.

Replicas beside shards: three of four micro-steps only reduce inside a replica and keep the sum, the
fourth adds up over the replicas. There parts were lost or divided twice. Right: the gradient is
that of four batches accumulated in one process and then averaged over all ranks.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_close, assert_served, gradients, numbers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

MICRO_STEPS = 4


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(index, *parameter.shape))
    return model


def loss(model: nn.Module, rank: int, micro: int) -> torch.Tensor:
    return model(numbers(100 + 10 * micro + rank, 4, 5)).square().mean()


@pytest.mark.parametrize("memory_mode", ["in_place", "slot_reuse"])
def test_accumulated_sums_lose_nothing(memory_mode: str) -> None:
    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model = build()
        sharded(model, model[0], model[1], mesh=mesh, mp_policy=policy)
        alone = build()
        for _ in range(2):
            model.zero_grad()
            alone.zero_grad()
            for micro in range(MICRO_STEPS):
                model.set_requires_all_reduce(micro == MICRO_STEPS - 1)
                loss(model, rank, micro).backward()
                for peer in range(size):
                    (loss(alone, peer, micro) / size).backward()
            assert_close(gradients(model), gradients(alone))
        assert_served(model)

    run_ranks(4, body, environment={"TIDE_MEMORY_MODE": memory_mode})
