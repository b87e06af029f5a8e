"""torchtitan 4593.

A dimension that two kinds of parallelism cut one after another: 10 rows over 2 tensor ranks are 5
rows each, which 2 data ranks hold as 3 and 2. There 6 or 4 rows came back. Right: 5 rows, and the
whole parameter of 10; with replicas beside shards (2 x 2) likewise; what is frozen stays frozen.
"""

from __future__ import annotations

import torch
from harness import run_ranks
from reference import (
    assert_close,
    assert_equal_training,
    assert_served,
    numbers,
    sharded,
    train,
    train_alone,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Two(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(6, hidden)
        self.down = nn.Linear(hidden, 6, bias=False)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(index, *parameter.shape))
        self.up.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def test_tensor_parallel_then_data_parallel() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(numbers(50 + rank + step, 4, 6)).square().mean()

    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        model = Two(10)
        parallelize_module(
            model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        sharded(model, mesh=mesh["data"])
        data_rank = mesh["data"].get_local_rank()
        assert model.up.weight.to_local().shape == ((3, 2)[data_rank], 6)
        model.unshard()
        assert model.up.weight.to_local().shape == (5, 6)
        assert model.up.weight.shape == (10, 6)
        model.reshard()
        frozen = model.up.bias.full_tensor().clone()
        # Both tensor ranks of a data rank see the same batch.
        train(model, lambda m, _, step: loss(m, data_rank, step), steps=2)
        alone = Two(10)
        train_alone(alone, loss, 2, steps=2)
        assert_close(weights(model), weights(alone))
        assert torch.equal(model.up.bias.full_tensor(), frozen)
        assert model.up.bias.grad is None and not model.up.bias.requires_grad
        assert_served(model, groups=1)

    run_ranks(4, body)


def test_replicas_beside_shards() -> None:
    def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
        return model(numbers(70 + rank + 10 * step, 4, 6)).square().mean()

    def body(rank: int, size: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        model = sharded(Two(5), mesh=mesh)
        assert model.up.weight.to_local().shape == ((3, 2)[rank % 2], 6)
        frozen = model.up.bias.full_tensor().clone()
        assert_equal_training(model, Two(5), loss, steps=2)
        assert model.up.weight.full_tensor().shape == (5, 6)
        assert torch.equal(model.up.bias.full_tensor(), frozen)
        assert_served(model, groups=1)

    run_ranks(4, body)
