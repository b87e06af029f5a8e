"""What models go through beside training steps: exceptions, checkpoints, changes after planning,
the group's end."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from cases import MASTERS, by_block
from harness import folder, init_group, run_ranks
from models import Model, loss_of
from steps import build, step, words
from tide import _C
from tide.fsdp.plan import groups_of
from tide.fsdp.record import record_of
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, share_comm_ctx
from trial import TORCH, Setting, local


def group_of(module: Any) -> Any:
    return groups_of(module._get_fsdp_state())[0]


def shards(model: Any) -> dict[str, torch.Tensor]:
    return {name: local(p).clone() for name, p in model.named_parameters()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"),
    reason="stock FSDP2 of this torch cannot recover from an exception",
)
@pytest.mark.parametrize(
    "where",
    [
        "forward",
        pytest.param(
            "backward",
            marks=pytest.mark.skipif(
                TORCH < (2, 15), reason="stock FSDP2 of this torch goes on with other numbers"
            ),
        ),
    ],
)
def test_training_goes_on_after_an_exception(where: str) -> None:
    """The failed step is lost, the next ones are those of a run without it."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            raise ArithmeticError("on purpose")

    def body(rank: int, size: int) -> bool:
        found = []
        for fails in (False, True):
            model = build(policy=MASTERS)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model, optimizer)
            if fails:

                def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
                    if where == "forward":
                        raise ArithmeticError("on purpose")
                    return Fails.apply(output)

                handle = model.blocks[2].norm.register_forward_hook(hook)
                with pytest.raises(ArithmeticError):
                    step(model)
                handle.remove()
                model.reset_iter_state()
                for block in model.blocks:
                    record = record_of(group_of(block))
                    assert record is not None and not record.holds_slot and record.pending is None
            for seed in range(1, 4):
                step(model, optimizer, seed)
            assert not any(row.stock_calls for row in tide.report(model))
            found.append(shards(model))
        return equal(*found)

    assert all(run_ranks(4, body))


@pytest.mark.parametrize("unsharded", [False, True])
def test_the_model_outlives_the_process_group(unsharded: bool) -> None:
    """Parameters, unsharded or not, and the state_dict are good after destroy_process_group."""

    def body(rank: int, size: int) -> bool:
        model = build()
        step(model)
        expected = {n: p.full_tensor().clone() for n, p in model.blocks[0].named_parameters()}
        mine = shards(model)
        if unsharded:
            model.blocks[0].unshard()
            assert _C.storage_is_bound(model.blocks[0].up.weight)
        dist.destroy_process_group()
        gc.collect()
        if unsharded:
            for name, parameter in model.blocks[0].named_parameters():
                assert torch.equal(parameter, expected[name])
            model.blocks[0].up.weight.data.mul_(1.0)
            model.blocks[0].reshard()
        state = model.state_dict()
        assert equal({n: local(t) for n, t in state.items()}, mine)
        del model, state
        gc.collect()
        return True

    assert all(run_ranks(2, body))


def test_a_new_group_serves_a_new_model() -> None:
    """Three rounds of init, train, destroy in one process; the old model is dropped late."""

    def body(rank: int, size: int) -> bool:
        old: Any = None
        losses = []
        for round_ in range(3):
            init_group(
                store=dist.PrefixStore(str(round_), dist.FileStore(str(folder() / "s"), size))
            )
            torch.manual_seed(0)
            model: Any = Model()
            for block in model.blocks:
                fully_shard(block)
            fully_shard(model)
            losses.append(step(model))
            assert all(row.path == "tide" for row in tide.report(model))
            dist.destroy_process_group()
            old = model
        del old
        assert losses[0] == losses[1] == losses[2]
        return True

    assert all(run_ranks(2, body, init=False))


def test_state_dicts_alias_the_shards_and_load_back() -> None:
    """A state_dict taken before training follows it; loading copies or assigns, gathers see
    both."""

    def body(rank: int, size: int) -> bool:
        model = build()
        early = model.state_dict()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer)
        assert equal({n: local(t) for n, t in early.items()}, shards(model))
        kept = {n: t.detach().clone() for n, t in model.state_dict().items()}
        before = loss_of(model, words(5)).detach()
        for assign in (False, True):
            step(model, optimizer, 1)
            assert loss_of(model, words(5)) != before
            for module in (model, *model.blocks):
                module.reshard()
            model.load_state_dict({n: t.clone() for n, t in kept.items()}, assign=assign)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            assert torch.equal(loss_of(model, words(5)).detach(), before)
            for module in (model, *model.blocks):
                module.reshard()
        assert not any(row.stock_calls for row in tide.report(model))
        return True

    assert all(run_ranks(4, body))


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_checkpoint_loads_onto_another_number_of_ranks(ranks: int, tmp_path: Path) -> None:
    """Model and optimizer, bit for bit; and gathers see what was loaded."""

    def make(seed: int) -> tuple[Any, Any, dict[str, Any]]:
        torch.manual_seed(seed)
        model = Model()
        by_block(model, Setting("tide"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step(model, optimizer)
        weights, moments = get_state_dict(model, optimizer)
        return model, optimizer, {"model": weights, "optimizer": moments}

    def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
        found = {name: tensor.full_tensor() for name, tensor in state["model"].items()}
        for name, moments in state["optimizer"]["state"].items():
            found[f"moment of {name}"] = moments["exp_avg"].full_tensor()
        return found

    def save(rank: int, size: int) -> Any:
        _, _, state = make(0)
        checkpoint.save(state, checkpoint_id=str(tmp_path))
        return whole(state)

    def load(rank: int, size: int) -> Any:
        model, optimizer, state = make(7)
        checkpoint.load(state, checkpoint_id=str(tmp_path))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        loaded = whole(
            dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        )
        model.blocks[0].unshard()
        for name, parameter in model.blocks[0].named_parameters():
            assert torch.equal(parameter, loaded[f"blocks.0.{name}"])
        model.blocks[0].reshard()
        step(model, optimizer)
        assert all(row.path == "tide" and not row.stock_calls for row in tide.report(model))
        return loaded

    saved = run_ranks(4, save)[0]
    assert len(saved) == 2 * (4 * 7 + 2)
    assert all(equal(loaded, saved) for loaded in run_ranks(ranks, load))


def test_changing_the_dtype_after_planning_does_what_stock_does() -> None:
    def body(rank: int, size: int) -> list[str]:
        outcomes = []
        for engine in ("stock", "tide"):
            model = build(engine)
            step(model)
            model.zero_grad()
            model.to(torch.bfloat16)
            try:
                outcomes.append(str(step(model)))
            except (RuntimeError, AssertionError) as error:
                outcomes.append(type(error).__name__)
        return outcomes

    for stock, ours in run_ranks(2, body):
        assert stock == ours


def test_unsharding_before_the_first_forward_goes_stock_and_is_planned_later() -> None:
    def body(rank: int, size: int) -> bool:
        model = build()
        model.blocks[0].unshard()
        assert not _C.storage_is_bound(model.blocks[0].up.weight)
        step(model)
        model.blocks[0].unshard()
        assert _C.storage_is_bound(model.blocks[0].up.weight)
        return all(row.path == "tide" and not row.stock_calls for row in tide.report(model))

    assert all(run_ranks(2, body))


def test_inference_before_training_does_what_stock_does() -> None:
    def body(rank: int, size: int) -> list[str]:
        outcomes = []
        for engine in ("stock", "tide:fsdp=gather"):
            model = build(engine)
            with torch.inference_mode():
                first = float(loss_of(model, words()))
            for module in (model, *model.blocks):
                module.reshard()
            try:
                outcomes.append(f"{first} {step(model)}")
            except RuntimeError as error:
                outcomes.append(f"{first} {type(error).__name__}")
        return outcomes

    for stock, ours in run_ranks(2, body):
        assert stock == ours


def test_more_unsharded_groups_than_slots_go_stock_for_that_call() -> None:
    """set_reshard_after_forward(False) after planning: numbers stay, the report counts the
    calls."""

    def body(rank: int, size: int) -> bool:
        losses = []
        for engine in ("stock", "tide:fsdp=gather"):
            model = build(engine)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step(model, optimizer)
            model.set_reshard_after_forward(False)
            losses.append([step(model, optimizer, seed) for seed in range(3)])
            model.set_reshard_after_forward(True)
            losses[-1] += [step(model, optimizer, seed) for seed in range(3)]
        assert losses[0] == losses[1]
        reasons = {reason for row in tide.report(model) for reason in row.stock_calls}
        assert reasons == {"gather: no slot was free for this call"}
        before = [row.stock_calls for row in tide.report(model)]
        model.set_reshard_after_forward(True)
        step(model, optimizer)
        after = [row.stock_calls for row in tide.report(model)]
        return before == after

    assert all(run_ranks(2, body))


def test_keeping_storages_for_a_while() -> None:
    """On and off while slots are bound: a slot whose storages are kept is not given away."""

    def body(rank: int, size: int) -> bool:
        losses = []
        for engine in ("stock", "tide:fsdp=gather"):
            model = build(engine)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            losses.append([step(model, optimizer)])
            block = model.blocks[1]
            block.unshard()
            block.set_keep_unsharded_storage(True)
            address = block.up.weight.data_ptr()
            losses[-1] += [step(model, optimizer, seed) for seed in range(1, 4)]
            block.unshard()
            assert block.up.weight.data_ptr() == address
            block.set_keep_unsharded_storage(False)
            block.reshard()
            losses[-1] += [step(model, optimizer, seed) for seed in range(4, 7)]
        record = record_of(group_of(model.blocks[1]))
        assert record is not None and not record.holds_slot
        return losses[0] == losses[1]

    if not hasattr(FSDPModule, "set_keep_unsharded_storage"):
        pytest.skip("this torch cannot keep unsharded storages")
    assert all(run_ranks(2, body))


@pytest.mark.parametrize("shared", [False, True])
def test_two_roots_share_the_slots_of_a_process_group(shared: bool) -> None:
    """As pipeline stages on one rank do; `shared`: their streams too."""

    def body(rank: int, size: int) -> bool:
        losses = []
        for engine in ("stock", "tide:fsdp=gather"):
            first, second = build(engine), build(engine)
            if shared:
                share_comm_ctx([first, second])
            losses.append([])
            for seed in range(3):
                a = loss_of(first, words(seed))
                if shared:
                    a.backward()
                b = loss_of(second, words(seed + 9))
                (b * 2).backward()
                if not shared:
                    a.backward()
                losses[-1] += [float(a), float(b)]
        assert not any(row.stock_calls for root in (first, second) for row in tide.report(root))
        return losses[0] == losses[1]

    assert all(run_ranks(2, body))


def test_a_comm_set_after_planning_is_the_users_to_keep() -> None:
    def body(rank: int, size: int) -> bool:
        from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

        calls = []

        class Counting(DefaultAllGather):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                calls.append(1)
                return super().__call__(*args, **kwargs)

        model = build()
        step(model)
        with pytest.raises(AssertionError, match="custom"):
            model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
        model.blocks[0].set_custom_all_gather(Counting())
        step(model)
        return len(calls) == 2

    assert all(run_ranks(2, body))


def test_taking_the_seam_out_leaves_marked_groups_stock() -> None:
    def body(rank: int, size: int) -> bool:
        from tide import fsdp

        model = build("tide:fsdp=gather")
        losses = [step(model)]
        fsdp.uninstall()
        losses.append(step(model))
        assert not _C.storage_is_bound(group_of(model).fsdp_params[0].all_gather_outputs[0])
        assert fsdp.install()
        losses.append(step(model))
        return losses[0] == losses[1] == losses[2]

    assert all(run_ranks(2, body))


def test_a_shard_that_moved_on_one_rank_is_read_where_it_is() -> None:
    def body(rank: int, size: int) -> bool:
        model = build()
        step(model)
        if rank == 1:
            parameter = group_of(model.blocks[1]).fsdp_params[2]
            moved = parameter._sharded_param_data.clone()
            parameter._sharded_param_data = moved
            parameter.sharded_param._local_tensor = moved.view(parameter.padded_sharded_param_size)[
                : parameter.sharded_size[0]
            ]
            moved.add_(1.0)
        expected = model.blocks[1].up.weight.full_tensor().clone()
        model.blocks[1].unshard()
        assert torch.equal(model.blocks[1].up.weight, expected)
        return not any(row.stock_calls for row in tide.report(model))

    assert all(run_ranks(2, body))


def test_after_a_failure_the_model_can_still_be_saved() -> None:
    """The group broke in the middle of a step; resharding and state_dict say nothing more about
    it."""

    def body(rank: int, size: int) -> bool:
        model = build()
        step(model)
        mine = shards(model)
        if rank == 1:
            dist.destroy_process_group()
            return True
        with pytest.raises(dist.DistBackendError):
            step(model)
        for module in (model, *model.blocks):
            module.reshard()
        return equal({n: local(t) for n, t in model.state_dict().items()}, mine)

    assert all(run_ranks(2, body, group_timeout=5))
