"""pytorch 171495.

A group over two nodes tried to hand a descriptor to a process on another machine and died with
"failed to send fd". Right: before anything is sent all ranks agree which of them share a node.
Equal nodes are joined by rails; unequal ones go another way, with a sentence that says "node". The
numbers are right in both.
"""

from __future__ import annotations

import pytest
import tide
import torch
from harness import run_ranks
from reference import assert_equal_training, numbers, sharded
from torch import nn


def build() -> nn.Module:
    model = nn.Linear(4, 6)
    with torch.no_grad():
        model.weight.copy_(numbers(1, 6, 4))
        model.bias.copy_(numbers(2, 6))
    return model


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(numbers(20 + 10 * step + rank, 3, 4)).square().mean()


@pytest.mark.parametrize(("node_size", "path"), [(2, "tide"), (3, "stock")])
def test_two_nodes_are_told_apart(node_size: int, path: str) -> None:
    def body(rank: int, size: int) -> str:
        model = sharded(build())
        assert_equal_training(model, build(), loss, steps=2)
        row = tide.report(model).rows[0]
        assert row.path == path, row
        assert "errno" not in row.reason.lower()
        return row.reason

    reasons = run_ranks(4, body, options=lambda: tide.Options(node_size=node_size))
    assert len(set(reasons)) == 1, reasons
    assert ("node" in reasons[0]) == (path == "stock"), reasons
