"""TIDE_FSDP and TIDE_MEMORY_MODE as environment variables of unchanged training code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import by_block
from harness import run_ranks
from models import Model
from torch.distributed.fsdp import fully_shard
from trial import Case, Trainer, differs


def default_mesh(model: Any, setting: Any) -> None:
    """As users write it: no mesh, the default process group."""
    if setting.engine == "stock":
        by_block(model, setting)
        return
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


@pytest.mark.parametrize(
    ("directions", "path", "reason"),
    [
        ("both", "tide", ""),
        ("gather", "gather", "TIDE_FSDP=gather leaves reductions stock"),
        ("reduce", "reduce", "TIDE_FSDP=reduce leaves gathers stock"),
        ("0", "stock", "TIDE_FSDP=0 leaves FSDP2 groups stock"),
    ],
)
@pytest.mark.parametrize("memory", ["in_place", "slot_reuse"])
def test_the_environment_chooses(directions: str, memory: str, path: str, reason: str) -> None:
    case = Case(Model, default_mesh)

    def body(rank: int, size: int) -> Any:
        stock = Trainer(case, "stock").run()
        outcome = Trainer(case, "tide").run()
        close = all(
            torch.allclose(g, stock.gradients[n], rtol=1e-4, atol=1e-6)
            for n, g in outcome.gradients.items()
        )
        same = differs(outcome, stock) == ""
        return close, same, outcome.report

    environment = {"TIDE_FSDP": directions, "TIDE_MEMORY_MODE": memory}
    for close, same, report in run_ranks(2, body, environment=environment):
        assert close and (same or directions in ("both", "reduce"))
        for row in report:
            assert (row.path, row.reason) == (path, reason)
            assert row.memory == (memory if path in ("tide", "reduce") else "")


def test_a_wrong_word_is_refused_by_name() -> None:
    def body(rank: int, size: int) -> str:
        with pytest.raises(ValueError) as raised:
            from harness import init_group

            init_group()
        return str(raised.value)

    for message in run_ranks(2, body, init=False, environment={"TIDE_FSDP": "sideways"}):
        assert "TIDE_FSDP" in message and "sideways" in message and "both" in message


def test_debug_wrappers_are_looked_through() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around every backend."""
    case = Case(Model, by_block)

    def body(rank: int, size: int) -> Any:
        outcome = Trainer(case, "tide:fsdp=gather").run()
        return differs(outcome, Trainer(case, "stock").run()), outcome.report

    environment = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    for different, report in run_ranks(2, body, environment=environment):
        assert different == ""
        assert all(row.path == "gather" and not row.stock_calls for row in report), str(report)
