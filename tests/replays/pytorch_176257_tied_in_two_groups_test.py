"""pytorch 176257, accelerate 4171, ezpz 237.

A weight that two modules share, each given to fully_shard on its own: two groups would own the same
parameter. Right: torch refuses with a ValueError that names the parameter, or keeps the weight in
one group; on tide neither more nor less happens than on gloo, and the process group still works.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import run_ranks
from reference import numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        with torch.no_grad():
            self.embedding.weight.copy_(numbers(2, 10, 8))
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words))


def outcome(backend: str) -> tuple[str, str]:
    """What happens, up to the end of one step: the error's kind and words, or nothing."""
    mesh = init_device_mesh(
        "cpu", (dist.get_world_size(),), mesh_dim_names=("x",), backend_override={"x": backend}
    )
    model = Tied()
    try:
        fully_shard(model.embedding, mesh=mesh)
        fully_shard(model.head, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.arange(10)).square().mean().backward()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def test_tide_adds_nothing() -> None:
    def body(rank: int, size: int) -> tuple[str, str]:
        stock, ours = outcome("gloo"), outcome("tide")
        assert ours == stock
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
        return ours

    for kind, message in run_ranks(2, body):
        assert kind == "" or (kind == "ValueError" and "weight" in message), (kind, message)
