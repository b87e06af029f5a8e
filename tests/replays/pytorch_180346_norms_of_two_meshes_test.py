"""pytorch 180346, 180501.

Dense parameters live on one mesh, experts on another; one clip over all of them mixed the meshes.
Right: the norm of both parts together is that of one process, and so are the clipped gradients.
"""

from __future__ import annotations

import torch
from harness import run_ranks
from reference import assert_close, assert_served, gradients, numbers, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LIMIT = 0.1


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(6, 10)
        self.expert = nn.Linear(10, 6)
        with torch.no_grad():
            for index, parameter in enumerate(self.parameters()):
                parameter.copy_(numbers(index, *parameter.shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(torch.tanh(self.dense(x)))


def loss(model: nn.Module, rank: int) -> torch.Tensor:
    return model(numbers(60 + rank, 5, 6)).square().mean()


def clip_by_mesh(model: nn.Module) -> torch.Tensor:
    """One total over per-mesh norms, as programs with several meshes do it."""
    parts = []
    for part in (model.dense, model.expert):
        norm = torch.nn.utils.get_total_norm([p.grad for p in part.parameters()])
        parts.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    total = torch.linalg.vector_norm(torch.stack(parts))
    for part in (model.dense, model.expert):
        torch.nn.utils.clip_grads_with_norm_(list(part.parameters()), LIMIT, total)
    return total


def test_one_clip_over_two_meshes() -> None:
    def body(rank: int, size: int) -> None:
        dense = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))
        model = Mixture()
        fully_shard(model.expert, mesh=pairs)
        fully_shard(model.dense, mesh=dense)
        sharded(model, mesh=dense)
        alone = Mixture()
        loss(model, rank).backward()
        for peer in range(size):
            (loss(alone, peer) / size).backward()
        norm = clip_by_mesh(model)
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), LIMIT)
        torch.testing.assert_close(norm, wanted)
        assert wanted.item() > 2 * LIMIT
        assert_close(gradients(model), gradients(alone))
        assert_served(model)

    run_ranks(4, body)
