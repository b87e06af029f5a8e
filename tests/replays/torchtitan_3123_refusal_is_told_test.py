"""torchtitan 3123.

A flag that asked for a faster path was ignored without a word where it could not be served. Right:
tide says in one sentence why a group goes stock, `tide.report` lists it beside the served ones, and
the printed report shows the sentence once.
"""

from __future__ import annotations

from typing import Any

import tide
import torch
from harness import run_ranks
from reference import assert_equal_training, numbers, sharded
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard


def build() -> nn.Module:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(index, *parameter.shape))
    return model


def loss(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    return model(numbers(20 + 10 * step + rank, 3, 4)).square().mean()


def test_each_refusal_is_listed_with_its_reason() -> None:
    def body(rank: int, size: int) -> Any:
        from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

        class Own(collectives.DefaultAllGather):
            pass

        model: Any = build()
        fully_shard(model[0])
        fully_shard(model[1])
        model[1].set_custom_all_gather(Own())
        fully_shard(model[2], offload_policy=CPUOffloadPolicy(pin_memory=False))
        sharded(model)
        assert_equal_training(model, build(), loss, steps=2)
        report = tide.report(model)
        rows = {row.group: (row.path, row.reason) for row in report}
        return rows, str(report)

    results = run_ranks(2, body)
    for rows, printed in results:
        assert rows == results[0][0]
        assert rows["0"] == ("tide", "")
        assert rows["1"][0] == "stock" and "custom all-gather is set (Own)" in rows["1"][1]
        assert rows["2"][0] == "stock" and "offloaded to the CPU" in rows["2"][1]
        assert printed.count("custom all-gather is set (Own)") == 1
        assert "1 of 3 groups on tide" in " ".join(printed.split())
