"""Trains the same model in one process and on ranks.

A loss is a function of (model, rank, step). On ranks each computes its own and FSDP2 takes the mean
of the gradients; alone, the mean of the losses of all ranks gives the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tide
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

Loss = Callable[[Any, int, int], torch.Tensor]


def numbers(seed: int, *shape: int) -> torch.Tensor:
    """Random numbers that depend on the seed alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a sharded one; collective."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(p).clone() for name, p in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: whole(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}


def train(model: Any, loss: Loss, steps: int = 1, rate: float = 0.5) -> None:
    """Steps of SGD on this rank's losses; the last step's gradients stay."""
    rank = dist.get_rank()
    for index in range(steps):
        model.zero_grad()
        loss(model, rank, index).backward()
        move(model, rate)


def train_alone(model: Any, loss: Loss, ranks: int, steps: int = 1, rate: float = 0.5) -> None:
    """The same in one process."""
    for index in range(steps):
        model.zero_grad()
        for rank in range(ranks):
            (loss(model, rank, index) / ranks).backward()
        move(model, rate)


def move(model: nn.Module, rate: float) -> None:
    torch.optim.SGD(model.parameters(), lr=rate).step()


def assert_equal_training(model: Any, alone: Any, loss: Loss, steps: int = 1) -> None:
    """Trains both and compares all weights and the last gradients; sums differ in order only."""
    train(model, loss, steps)
    train_alone(alone, loss, dist.get_world_size(), steps)
    assert_close(weights(model), weights(alone))
    assert_close(gradients(model), gradients(alone))


def assert_close(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )


def assert_served(model: nn.Module, groups: int | None = None) -> None:
    """Every group with parameters ran on tide, and no call of it went stock."""
    report = tide.report(model)
    for row in report:
        assert row.path == "tide" and row.gathers > 0 and not row.stock_calls, f"\n{report}"
    assert groups is None or len(report.rows) == groups, f"\n{report}"


def sharded(model: nn.Module, *parts: Any, **keywords: Any) -> Any:
    """`fully_shard` of each part (a module, or a list of modules), then of the model."""
    for part in parts:
        fully_shard(part, **keywords)
    return fully_shard(model, **keywords)
