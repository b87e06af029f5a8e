"""Megatron-LM 5222, ROCm/Megatron-LM 146.

Two gradient buffers serve many layers in turn: the next layer's gradient overwrote a buffer that
was still being sent, or the third request in flight was an assertion. Right: Slot-Reuse waits until
the slot has been read, never overwrites and never asserts. One rank is slow to join each reduction,
so the others' buffers stay busy for long.
"""

from __future__ import annotations

import time

import pytest
import tide
import torch
from harness import run_ranks
from reference import assert_served, sharded
from torch import nn

LAYERS, ROWS = 6, 2048


class Layer(nn.Module):
    """Hands the gradient of each element on as the layer's own factor."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ROWS, 16))
        self.factor = factor

    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + (self.weight * (self.factor * scale)).sum()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(float(index + 1)) for index in range(LAYERS))

    def forward(self, scale: float) -> torch.Tensor:
        x = torch.zeros(())
        for layer in self.layers:
            x = layer(x, scale)
        return x


@pytest.mark.parametrize("slow", [0, 2])
def test_a_busy_slot_is_waited_for(slow: int) -> None:
    def body(rank: int, size: int) -> None:
        model = Stack()
        sharded(model, *model.layers)
        if rank == slow:
            # Late with every layer's gradient.
            for layer in model.layers:
                layer.register_full_backward_hook(lambda *_: time.sleep(0.02))
        for step in range(3):
            model.zero_grad()
            model(float(rank + 1 + step)).backward()
            mean = sum(range(1, size + 1)) / size + step
            for index, layer in enumerate(model.layers):
                shard = layer.weight.grad.to_local()
                wanted = torch.full_like(shard, (index + 1) * mean)
                assert torch.equal(shard, wanted), (step, index)
        assert_served(model)
        assert all(row.memory == "slot_reuse" for row in tide.report(model))

    run_ranks(4, body, options=lambda: tide.Options(memory_mode="slot_reuse"))
