"""pytorch 117975 (its example), 103170 (its review).

Parameters with fewer rows than ranks, or rows that do not divide: shards are padded for the
collective. Right: what was gathered equals the original bit for bit, and nobody ever sees the
padding.
"""

from __future__ import annotations

import pytest
import torch
from harness import run_ranks
from reference import assert_served, sharded
from torch import nn


class Whole(nn.Module):
    """Its output hands every element on, so each gradient is known: `rank + 1` everywhere."""

    def __init__(self, shapes: list[tuple[int, int]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            nn.Parameter(bits(i, shape)) for i, shape in enumerate(shapes)
        )

    def forward(self, factor: float) -> torch.Tensor:
        self.seen = [part.detach().clone() for part in self.parts]
        return sum((part * factor).sum() for part in self.parts)


def bits(seed: int, shape: tuple[int, int]) -> torch.Tensor:
    """Every bit pattern of finite and infinite numbers may come, and minus zero."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
    numbers = pattern.to(torch.int32).view(torch.float32)
    numbers = torch.where(numbers.isnan(), torch.tensor(-0.0), numbers)
    numbers[0, 0] = torch.inf
    return numbers


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(torch.int32), other.contiguous().view(torch.int32)
    )


@pytest.mark.parametrize(
    "ranks, shapes", [(2, [(3, 3), (2, 2)]), (4, [(3, 5)]), (4, [(1, 7), (5, 2), (2, 3)])]
)
def test_bits_come_back_and_padding_never_does(ranks: int, shapes: list[tuple[int, int]]) -> None:
    def body(rank: int, size: int) -> None:
        # Fresh memory is NaN: padding that anyone reads would show.
        torch.use_deterministic_algorithms(True)
        model = sharded(Whole(shapes))
        for step in range(2):
            model.zero_grad()
            model(float(rank + 1)).backward()
            for index, shape in enumerate(shapes):
                assert same_bits(model.seen[index], bits(index, shape)), (step, index)
                part = model.parts[index]
                rows = -(-shape[0] // size)
                own = max(0, min(shape[0] - rank * rows, rows))
                assert part.to_local().shape == (own, shape[1])
                mean = sum(range(1, size + 1)) / size
                assert torch.equal(part.grad.to_local(), torch.full((own, shape[1]), mean))
                assert same_bits(part.full_tensor().detach(), bits(index, shape))
        assert_served(model, groups=1)

    run_ranks(ranks, body)
