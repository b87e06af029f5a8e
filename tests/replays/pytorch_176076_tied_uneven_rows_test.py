"""pytorch 176076 (fixed by 176225, 176257).

An embedding and a linear layer share their weight and are sharded as one group; the rows do not
divide by the ranks (3, 3, 3, 1). There the last rank's rows were never updated. Right: after one
step all rows are those of a run in one process.
"""

from __future__ import annotations

import torch
from harness import run_ranks
from reference import assert_equal_training, assert_served, numbers, sharded, weights
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(words)))


def build() -> Tied:
    model = Tied()
    with torch.no_grad():
        model.head.weight.copy_(numbers(1, 10, 8))
    return model


def loss(model: Tied, rank: int, step: int) -> torch.Tensor:
    words = torch.arange(10).roll(rank + step)
    return F.cross_entropy(model(words), words.flip(0))


def test_every_row_is_updated() -> None:
    def body(rank: int, size: int) -> None:
        model = build()
        sharded(model, [model.embedding, model.head])
        assert model.head.weight.to_local().shape[0] == (3, 3, 3, 1)[rank]
        before = weights(model)
        alone = build()
        assert_equal_training(model, alone, loss)
        assert model.head.weight is model.embedding.weight
        for name, after in weights(model).items():
            moved = (after != before[name]).any(dim=1)
            assert bool(moved.all()), f"rows {(~moved).nonzero().flatten().tolist()} stayed"
        assert_equal_training(model, alone, loss)
        assert_served(model, groups=1)

    run_ranks(4, body)
