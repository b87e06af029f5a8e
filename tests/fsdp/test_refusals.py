"""A group that cannot be served goes stock on all ranks, with the reason of the rank that refuses.

Each condition is forced on rank 2 alone, for block 1 alone: the others stay on tide and the numbers
are right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tide
import torch
from cases import by_block, two_by_two
from harness import run_ranks
from models import Model
from tide.fsdp import plan
from tide.fsdp.plan import groups_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives
from trial import Case, Setting, Trainer, differs


class OtherAllGather(collectives.DefaultAllGather):
    pass


class OtherReduceScatter(collectives.DefaultReduceScatter):
    pass


class Subclass(torch.Tensor):
    """A tensor subclass without extensions."""


def custom_all_gather(group: Any) -> None:
    group._all_gather_comm = OtherAllGather()


def custom_reduce_scatter(group: Any) -> None:
    group._reduce_scatter_comm = OtherReduceScatter()


def own_output_function(group: Any) -> None:
    stock = group._all_gather_output_fn
    group._all_gather_output_fn = lambda *arguments: stock(*arguments)


def own_input_function(group: Any) -> None:
    stock = group._prepare_reduce_scatter_inputs
    group._prepare_reduce_scatter_inputs = lambda *arguments: stock(*arguments)


def offloaded(group: Any) -> None:
    group.fsdp_params[0].offload_to_cpu = True


def unreadable(group: Any) -> None:
    """Looking at the group raises on this rank."""
    stock = plan.parameter_facts

    def facts(parameter: Any) -> Any:
        if parameter in group.fsdp_params:
            raise LookupError("on purpose")
        return stock(parameter)

    plan.parameter_facts = facts


def subclass(group: Any) -> None:
    parameter = group.fsdp_params[0].sharded_param
    parameter._local_tensor = parameter._local_tensor.as_subclass(Subclass)


def extension(group: Any) -> None:
    """Hooks before and after the all-gather, which here change nothing."""
    parameter = group.fsdp_params[0]
    local = parameter._sharded_local_tensor

    def before(mesh: Any) -> Any:
        return (parameter._sharded_param_data,), None

    def after(outputs: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        (output,) = outputs
        return output.view(-1) if out is not None else (output.view(-1), (output,))

    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before, after


def another_option(group: Any) -> None:
    """Other slots than the peers would want. Stock itself goes on for one step only."""
    group.reshard_after_backward = False


CONDITIONS: dict[str, tuple[Callable[[Any], None], str]] = {
    "custom_all_gather": (custom_all_gather, "a custom all-gather is set (OtherAllGather)"),
    "custom_reduce_scatter": (
        custom_reduce_scatter,
        "a custom reduce-scatter is set (OtherReduceScatter)",
    ),
    "own_output_function": (own_output_function, "lays this group's all-gather output out"),
    "own_input_function": (own_input_function, "lays this group's gradients out"),
    "offloaded": (offloaded, "is offloaded to the CPU between its uses"),
    "unreadable": (unreadable, "LookupError while looking at the group: on purpose"),
    "subclass": (subclass, "is a Subclass, not a plain tensor"),
    "extension": (extension, "changes its bytes before the all-gather"),
    "another_option": (another_option, "ranks disagree"),
}


@pytest.mark.parametrize("name", list(CONDITIONS))
def test_one_ranks_refusal_sends_one_group_stock(name: str) -> None:
    force, sentence = CONDITIONS[name]
    if name.startswith("own_") and not hasattr(collectives, "_default_reduce_scatter_input_fn"):
        pytest.skip("FSDP2 of this torch has no such functions")

    def prepare(model: Any) -> None:
        if torch.distributed.get_rank() == 2:
            force(groups_of(model.blocks[1]._get_fsdp_state())[0])

    steps = 1 if name == "another_option" else 3
    case = Case(Model, by_block, steps=steps)
    refused = Case(Model, by_block, steps=steps, prepare=prepare)

    def body(rank: int, size: int) -> tuple[str, str, Any]:
        stock = Trainer(case, "stock").run()
        gather = Trainer(refused, "tide:fsdp=gather").run()
        outcome = Trainer(refused, "tide").run()
        close = all(
            torch.allclose(g, stock.gradients[n], rtol=1e-4, atol=1e-6)
            for n, g in outcome.gradients.items()
        )
        return differs(gather, stock), "" if close else "gradients", outcome.report

    reports = []
    for gather_differs, differs_far, report in run_ranks(4, body):
        assert gather_differs == "" and differs_far == ""
        reports.append(report)
        rows = {row.group: row for row in report}
        assert rows["blocks.1"].path == "stock", str(report)
        assert "rank 2" in rows["blocks.1"].reason and sentence in rows["blocks.1"].reason
        others = [row for group, row in rows.items() if group != "blocks.1"]
        assert all(row.path == "tide" and row.reason == "" for row in others), str(report)
    assert len({tuple(row.reason for row in report) for report in reports}) == 1


def test_replicas_refuse_together() -> None:
    """With HSDP the rows of the mesh vote apart; a refusal in one row counts in the other too."""

    def prepare(model: Any) -> None:
        if torch.distributed.get_rank() == 3:
            custom_all_gather(groups_of(model.blocks[1]._get_fsdp_state())[0])

    case = Case(Model, two_by_two, prepare=prepare)

    def body(rank: int, size: int) -> tuple[str, Any]:
        stock = Trainer(case, "stock").run()
        outcome = Trainer(case, "tide:fsdp=gather").run()
        return differs(outcome, stock), outcome.report

    for different, report in run_ranks(4, body):
        assert different == ""
        paths = {row.group: row.path for row in report}
        assert paths.pop("blocks.1") == "stock" and set(paths.values()) == {"gather"}
        (row,) = [row for row in report if row.group == "blocks.1"]
        assert row.reason == "replica 1, rank 1: a custom all-gather is set (OtherAllGather)"


def test_groups_of_other_backends_stay_theirs() -> None:
    """One model, some blocks on a gloo mesh and some on tide's."""

    def shard(model: Any, setting: Any) -> None:
        other, mesh = Setting("stock").mesh(), setting.mesh()
        for index, block in enumerate(model.blocks):
            fully_shard(block, mesh=other if index % 2 else mesh)
        fully_shard(model, mesh=mesh)

    case = Case(Model, shard)

    def body(rank: int, size: int) -> tuple[str, Any]:
        stock = Trainer(case, "stock").run()
        outcome = Trainer(case, "tide:fsdp=gather").run()
        return differs(outcome, stock), outcome.report

    for different, report in run_ranks(2, body):
        assert different == ""
        for row in report:
            theirs = row.group in ("blocks.1", "blocks.3")
            assert row.path == ("stock" if theirs else "gather")
            assert ("does not run on tide" in row.reason) == theirs


def test_the_arena_limit_sends_groups_stock() -> None:
    """One rank has less room than the others: the largest group goes, the small ones stay."""

    def body(rank: int, size: int) -> Any:
        limit = 40_000 if rank == 1 else 0
        trainer = Trainer(Case(Model, by_block), f"tide:arena_limit_bytes={limit}")
        return trainer.run().report

    reports = run_ranks(2, body)
    assert len({tuple((row.path, row.reason) for row in report) for report in reports}) == 1
    refused = [row for row in reports[0] if row.path == "stock"]
    assert 0 < len(refused) < len(reports[0].rows), str(reports[0])
    assert all("rank 1" in row.reason and "limit" in row.reason for row in refused)


def test_reasons_that_need_no_vote() -> None:
    """A mesh of one rank, a mesh that only replicates, another backend, and no forward yet."""

    def body(rank: int, size: int) -> dict[str, str]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        reasons = {}
        model = Model(blocks=1)
        mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        model(torch.zeros(1, 2, dtype=torch.int64)).sum().backward()
        reasons["one rank"] = tide.report(model).rows[0].reason
        for name in ("gloo", "tide"):
            mesh = init_device_mesh(
                "cpu", (size,), mesh_dim_names=("x",), backend_override={"x": name}
            )
            fully_shard(other := Model(blocks=1), mesh=mesh)
            reasons[name] = tide.report(other).rows[0].reason
        return reasons

    for reasons in run_ranks(2, body):
        assert "one rank" in reasons["one rank"]
        assert "does not run on tide for cpu tensors" in reasons["gloo"]
        assert "not planned yet" in reasons["tide"]


def test_a_plain_module_has_no_report() -> None:
    with pytest.raises(TypeError, match="fully_shard"):
        tide.report(torch.nn.Linear(2, 2))
