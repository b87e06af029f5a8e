"""MagiCompiler 57.

A condition makes one rank skip a layer that the others run. Right: an error on every rank, long
before the group's timeout, that names both layers and a rank; no hang, and no wrong numbers taken
for right ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from reference import sharded
from torch import nn


class Conditional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor, skip: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skip:
                x = layer(x)
        return x


@pytest.mark.parametrize("skipped", [0, 1])
def test_a_layer_skipped_on_one_rank(skipped: int) -> None:
    def body(rank: int, size: int) -> str:
        model: Any = Conditional()
        sharded(model, *model.layers)
        x = torch.ones(1, 4)
        model(x, skip=-1).sum().backward()
        with pytest.raises(dist.DistBackendError) as caught:
            for _ in range(2):
                model(x, skip=skipped if rank == 1 else -1).sum().backward()
        dist.distributed_c10d._abort_process_group()
        return str(caught.value)

    # The group's timeout is ten times the run's: the difference is found, not waited for.
    for message in run_ranks(3, body, group_timeout=600):
        assert f"layers.{skipped}" in message and "rank" in message, message
