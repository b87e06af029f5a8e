"""verl 6365.

Each rank went through a set or a dictionary in its own order, so ranks paired buffers that do not
belong together. Right: ranks compare what they call. Lists in another order are an error that names
the tensor, on every rank; parameter groups built in another order are refused by the vote with the
parameter's name; groups of equal shape used in another order are an error that names both.
"""

from __future__ import annotations

from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, run_ranks
from reference import sharded
from torch import nn


def order(rank: int, things: list[Any]) -> list[Any]:
    return things[::-1] if rank == 1 else things


def test_a_list_in_another_order() -> None:
    def body(rank: int, size: int) -> str:
        sizes = order(rank, [3, 5, 7])
        outputs = [torch.zeros(size * n) for n in sizes]
        with pytest.raises(dist.DistBackendError, match="rank") as caught:
            all_gather_list(outputs, [torch.ones(n) for n in sizes]).wait()
        assert all(float(output.sum()) == 0 for output in outputs)
        return str(caught.value)

    messages = run_ranks(3, body)
    assert any("tensor 0" in m and "rank 1" in m for m in messages), messages


class Bag(nn.Module):
    """Parameters registered in this rank's order."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        sizes = {"first": 6, "second": 8, "third": 10}
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(sizes[name], 2)))

    def forward(self) -> torch.Tensor:
        return sum(p.sum() for p in self.parameters())


def test_parameters_registered_in_another_order() -> None:
    def body(rank: int, size: int) -> str:
        model = sharded(Bag(order(rank, ["first", "second", "third"])))
        model._get_fsdp_state()._lazy_init()
        row = tide.report(model).rows[0]
        assert row.path == "stock"
        return row.reason

    reasons = run_ranks(2, body)
    assert len(set(reasons)) == 1 and "ranks disagree about parameter 0" in reasons[0], reasons
    assert "first" in reasons[0] or "third" in reasons[0]


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

    def forward(self) -> None: ...


def test_layers_of_equal_shape_in_another_order() -> None:
    def body(rank: int, size: int) -> str:
        model: Any = Three()
        sharded(model, *model.children())
        model._get_fsdp_state()._lazy_init()
        with pytest.raises(dist.DistBackendError, match=r"first.*third|third.*first") as caught:
            for name in order(rank, ["first", "second", "third"]):
                getattr(model, name)(torch.ones(1, 4))
        return str(caught.value)

    run_ranks(2, body, group_timeout=60)
