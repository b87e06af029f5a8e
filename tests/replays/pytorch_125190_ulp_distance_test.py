"""pytorch 125190.

From 4 ranks up, algorithms that add bf16 numbers in another order give other bits, which looked
like a bug. Right: results are compared in units in the last place. tide adds in fp32 and rounds
once, so it lies within half a unit of the exact sum, whatever the order; a sum that rounds each
addition (Gloo's) lies within one and a half, and somewhere they differ.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from harness import reduce_scatter_list, run_ranks
from reference import numbers

NUMEL = 5000


def contribution(rank: int) -> torch.Tensor:
    """Between 1 and 2, so that sums of four lie between 4 and 8: there one unit is 2^-5."""
    return (1 + numbers(rank, 4 * NUMEL).frac().abs()).to(torch.bfloat16)


def test_tide_is_half_a_unit_from_the_exact_sum() -> None:
    unit = 2.0**-5

    def body(rank: int, size: int) -> tuple[float, float, int]:
        exact = sum(contribution(peer).double() for peer in range(size))
        exact = exact.chunk(size)[rank]
        assert bool((exact >= 4).all() and (exact <= 8).all())
        found = []
        gloo = dist.new_group(backend="gloo")
        for group in (dist.group.WORLD, gloo):
            shard = [torch.zeros(NUMEL, dtype=torch.bfloat16)]
            reduce_scatter_list(shard, [contribution(rank)], group=group).wait()
            found.append(shard[0].double())
        ours, stock = found
        # Four bf16 numbers between 1 and 2 add up exactly in fp32: one rounding is all there is.
        assert torch.equal(ours, exact.to(torch.bfloat16).double())
        return (
            float((ours - exact).abs().max()) / unit,
            float((stock - exact).abs().max()) / unit,
            int((ours != stock).sum()),
        )

    results = run_ranks(4, body)
    assert max(ours for ours, _, _ in results) <= 0.5
    assert max(stock for _, stock, _ in results) <= 1.5
    assert sum(differ for _, _, differ in results) > 0
