"""What must hold between the seam, torch and the engine, one test each.

Streams and events exist on GPUs alone: where an invariant speaks of an event, the test asks the
same of the call that stands for it on CPU, the wait.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from cases import MASTERS, by_block
from harness import run_ranks
from lowlevel import gathered, plan_groups, vacated
from models import WORDS, Model, loss_of
from spy import watching
from tide import _C
from tide.fsdp import reduce
from tide.fsdp.plan import groups_of
from tide.fsdp.record import record_of
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from trial import Setting


def model_on_tide(policy: MixedPrecisionPolicy | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    words = ",".join(f"{key}={value}" for key, value in options.items())
    by_block(model, Setting(f"tide:{words}"), mp_policy=policy or MixedPrecisionPolicy())
    return model


def words() -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 7))


def step(model: Any) -> None:
    loss_of(model, words()).backward()


def group_of(module: Any) -> Any:
    return groups_of(module._get_fsdp_state())[0]


def storages(module: Any) -> list[torch.Tensor]:
    return [t for p in group_of(module).fsdp_params for t in p.all_gather_outputs]


def numbered(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)


def test_01_slots_follow_the_order_of_calls() -> None:
    """The slots that gathers get are the same on all ranks, and change in turn."""

    def body(rank: int, size: int) -> list[tuple[str, int, int]]:
        model = model_on_tide()
        with watching() as spy:
            for _ in range(2):
                time.sleep(0.02 * rank)
                step(model)
        return [(call.name, call.plan, call.slot) for call in spy.calls]

    ranks = run_ranks(4, body)
    assert all(calls == ranks[0] for calls in ranks)
    slots = {}
    for name, plan, slot in ranks[0]:
        if name == "gather":
            slots.setdefault(plan, []).append(slot)
    assert len({slot for taken in slots.values() for slot in taken}) >= 3, slots


def test_01_another_order_on_one_rank_is_an_error() -> None:
    def body(rank: int, size: int) -> str:
        model = model_on_tide()
        step(model)
        first, second = model.blocks[0], model.blocks[1]
        if rank == 1:
            first, second = second, first
        with pytest.raises(dist.DistBackendError) as raised:
            first.unshard()
            second.unshard()
        return str(raised.value)

    for message in run_ranks(2, body, group_timeout=10):
        assert "blocks.0" in message and "blocks.1" in message, message


def test_02_a_slot_is_not_written_before_its_rank_vacated_it() -> None:
    """Rank 0 is slow to vacate; meanwhile the others have gathered on into the same slot."""

    def body(rank: int, size: int) -> bool:
        backend: Any = tide.of()
        plans = plan_groups(backend, 4096, 4096, 4096, depth=0)
        for index, plan in enumerate(plans):
            output = gathered(backend, plan, torch.full((4096,), float(index)), slot=0)
            if rank == 0:
                time.sleep(0.3)
                assert bool((output == index).all())
            vacated(backend, plan, output)
        return True

    assert all(run_ranks(4, body))


def test_03_a_gather_reads_the_shards_after_the_optimizer() -> None:
    """Bit for bit, in every step, on every rank."""

    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for _ in range(3):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
            expected = {n: p.full_tensor().clone() for n, p in model.blocks[2].named_parameters()}
            model.blocks[2].unshard()
            for name, parameter in model.blocks[2].named_parameters():
                assert torch.equal(parameter, expected[name]), name
            model.blocks[2].reshard()
        return True

    assert all(run_ranks(4, body))


def test_04_a_waited_gather_has_every_ranks_shards() -> None:
    """Also when the others come late."""

    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        step(model)
        for block in model.blocks:
            expected = block.up.weight.full_tensor()
            time.sleep(0.05 * rank)
            block.unshard()
            assert torch.equal(block.up.weight, expected)
            block.reshard()
        return True

    assert all(run_ranks(4, body))


def test_05_shards_may_change_once_the_gather_was_waited_for() -> None:
    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        step(model)
        block = model.blocks[1]
        for _ in range(20):
            expected = block.up.weight.full_tensor()
            block.unshard()
            for parameter in group_of(block).fsdp_params:
                parameter._sharded_param_data.add_(1.0)
            dist.barrier()
            assert torch.equal(block.up.weight, expected)
            block.reshard()
        return True

    assert all(run_ranks(4, body))


def test_06_the_result_carries_a_work_exactly_when_asked_for() -> None:
    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        step(model)
        group = group_of(model.blocks[0])
        for asked in (True, False):
            group.unshard(async_op=asked)
            work = group._all_gather_result.all_gather_work
            assert isinstance(work, dist.distributed_c10d.Work) == asked and (work is None) != asked
            group.wait_for_unshard()
            group.reshard()
        return True

    assert all(run_ranks(2, body))


def test_07_storages_are_bound_before_use_and_released_by_reshard() -> None:
    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        bound: list[bool] = []
        model.blocks[0].norm.register_forward_hook(
            lambda *_: bound.extend(_C.storage_is_bound(t) for t in storages(model.blocks[0]))
        )
        step(model)
        assert len(bound) == 7 and all(bound)
        for block in model.blocks:
            assert all(t.untyped_storage().size() == 0 for t in storages(block))
            assert not any(_C.storage_is_bound(t) for t in storages(block))
            record = record_of(group_of(block))
            assert record is not None and not record.holds_slot
        return True

    assert all(run_ranks(2, body))


def test_08_a_dropped_gather_gives_its_slot_back() -> None:
    """At the end of a backward, after reset_iter_state, and when the group gathers again."""

    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        step(model)
        block = model.blocks[3]
        record = record_of(group_of(block))
        assert record is not None

        def released() -> bool:
            empty = all(t.untyped_storage().size() == 0 for t in storages(block))
            return record.pending is None and not record.holds_slot and empty

        loss = loss_of(model, words())
        model.blocks[0].set_modules_to_backward_prefetch([block])  # too late to be used
        loss.backward()
        assert released()
        if hasattr(model, "reset_iter_state"):
            block.unshard(async_op=True)
            model.reset_iter_state()
            assert released()
        block.unshard(async_op=True)
        group_of(block)._all_gather_result = None
        block.unshard()
        assert record.pending is None and torch.isfinite(block.up.weight).all()
        block.reshard()
        assert released()
        step(model)
        assert not any("no slot" in reason for r in tide.report(model) for reason in r.stock_calls)
        return True

    assert all(run_ranks(2, body))


def test_09_gradients_live_until_they_were_read() -> None:
    """And no longer: after the reduction nothing holds them."""

    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        step(model)
        alive: list[weakref.ref[torch.Tensor]] = []
        with watching() as spy:

            def note(call: Any) -> None:
                if call.name == "reduce":
                    alive.extend(weakref.ref(g) for g in call.arguments[1])

            def still_there(call: Any) -> None:
                assert all(r() is not None for r in alive[-len(call.arguments[1]) :])

            spy.on_call = note
            spy.on_return = lambda call: still_there(call) if call.name == "reduce" else None
            step(model)
        assert len(alive) == 4 * 7 + 2
        assert all(reference() is None for reference in alive)
        return True

    assert all(run_ranks(2, body))


def test_10_read_is_done_before_the_reduction_is() -> None:
    """In Slot-Reuse gradients are free at once, although a peer has not even begun."""

    def body(rank: int, size: int) -> bool:
        backend: Any = tide.of()
        (plan,) = plan_groups(backend, 64)
        gradient = torch.full((64 * size,), float(rank + 1))
        vacated(backend, plan, gathered(backend, plan, torch.zeros(64)))
        dist.barrier()
        if rank == 1:
            time.sleep(1.0)
        output = torch.empty(64)
        work = backend.reduce(plan, [0], [gradient], output, "sum", 1.0, True)
        work.wait_read()
        if rank == 0:
            assert not work.is_completed()
        gradient.fill_(-1.0)
        work.wait()
        assert torch.equal(output, torch.full((64,), 3.0))
        return True

    assert all(run_ranks(2, body))


def test_11_the_engine_owns_the_gradients_when_torch_clears_its_list() -> None:
    def body(rank: int, size: int) -> bool:
        model = model_on_tide()
        lists: list[list[Any]] = []
        stock = reduce.ReduceCall.run

        def run(self: Any, output: torch.Tensor, op: Any) -> None:
            assert lists[-1] == [] and len(self.gradients) > 0
            assert all(torch.isfinite(g).all() for g in self.gradients)
            stock(self, output, op)
            assert self.gradients == []

        start = reduce.ReduceCall.__init__

        def init(self: Any, record: Any, params: Any, gradients: Any, factor: Any) -> None:
            lists.append(gradients)
            start(self, record, params, gradients, factor)

        reduce.ReduceCall.run, reduce.ReduceCall.__init__ = run, init  # type: ignore[method-assign]
        step(model)
        assert len(lists) == 5
        return True

    assert all(run_ranks(2, body))


def test_12_a_gradient_that_is_not_contiguous_is_repaired_where_it_is() -> None:
    """On one rank only; the path stays the same on all, and so do the numbers."""

    def body(rank: int, size: int) -> list[torch.Tensor]:
        found = []
        for odd in (False, True):
            model = model_on_tide()
            step(model)
            model.zero_grad()
            torch.manual_seed(rank)

            def turn(parameter: torch.Tensor) -> None:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.t().contiguous().t()

            if odd and rank == 1:
                weights = [
                    p for p in group_of(model.blocks[1]).fsdp_params if len(p._orig_size) > 1
                ]
                for parameter in weights:
                    parameter._unsharded_param.register_post_accumulate_grad_hook(turn)
            with watching() as spy:
                spy.on_call = lambda call: (
                    [g.is_contiguous() or 1 / 0 for g in call.arguments[1]]
                    if (call.name == "reduce")
                    else None
                )
                step(model)
            assert all(row.path == "tide" and not row.stock_calls for row in tide.report(model))
            found.append(model.blocks[1].up.weight.grad.to_local().clone())
        return found

    for plain, turned in run_ranks(2, body):
        assert torch.equal(plain, turned)


def test_12_a_gradient_still_on_its_way_is_waited_for() -> None:
    """Tensor parallelism may leave a gradient as the promise of a collective."""
    plain = torch.arange(6.0)
    promised = AsyncCollectiveTensor(plain)
    found = reduce.readable(promised)
    assert type(found) is torch.Tensor and torch.equal(found, plain)
    assert reduce.readable(plain) is plain


def test_13_another_subset_on_one_rank_is_an_error() -> None:
    """Not a sum over different parameters."""

    def body(rank: int, size: int) -> str:
        model = model_on_tide()
        step(model)
        for parameter in group_of(model.blocks[2]).fsdp_params:
            if "down.bias" in parameter._param_fqn:
                parameter.sharded_param.requires_grad_(rank != 1)
        with pytest.raises(dist.DistBackendError) as raised:
            step(model)
        return str(raised.value)

    for message in run_ranks(2, body, group_timeout=10):
        assert "blocks.2" in message, message


@pytest.mark.parametrize("columns", [False, True])
def test_14_the_flat_output_is_in_torchs_order(columns: bool) -> None:
    """Whole numbers, so that sums are exact in any order: shards are equal to stock's, padding
    included."""

    class Numbered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.zeros(7, 4))
            self.b = nn.Parameter(torch.zeros(3, 8))
            self.c = nn.Parameter(torch.zeros(12))

        def forward(self, rank: int) -> torch.Tensor:
            parts = (self.a * (numbered(7, 4) + rank), self.b * (numbered(3, 8) * (rank + 1)))
            return parts[0].sum() + parts[1].sum() + (self.c * torch.arange(12.0)).sum()

    def body(rank: int, size: int) -> list[list[torch.Tensor]]:
        found = []
        for engine in ("stock", "tide"):
            model = Numbered()

            def place(parameter: nn.Parameter) -> Any:
                return torch.distributed.tensor.Shard(1 if columns and parameter.ndim > 1 else 0)

            fully_shard(model, mesh=Setting(engine).mesh(), shard_placement_fn=place)
            model(rank).backward()
            found.append([p.grad.to_local().clone() for p in model.parameters()])
        return found

    for stock, ours in run_ranks(4, body):
        assert all(torch.equal(a, b) for a, b in zip(stock, ours, strict=True))


@pytest.mark.parametrize(
    ("factor", "forced", "dtype", "expected"),
    [
        (None, False, torch.float32, 2.5),  # average
        (None, True, torch.float32, 2.5),  # sum, divided afterwards by torch
        (4.0, False, torch.float32, 2.5),
        (5.0, False, torch.float32, 2.0),  # premultiplied sum
        (5.0, True, torch.float32, 2.0),
        (None, False, torch.float16, 2.5),  # divided before and after, against overflow
        (8.0, False, torch.float16, 1.25),
    ],
)
def test_15_the_scale_is_the_one_that_torch_means(
    factor: float | None, forced: bool, dtype: torch.dtype, expected: float
) -> None:
    """Four ranks with gradients 1, 2, 3, 4."""

    def body(rank: int, size: int) -> list[float]:
        model: Any = nn.Linear(4, 8, bias=False)
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        fully_shard(model, mesh=Setting("tide").mesh(), mp_policy=policy)
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(forced)
        model(torch.full((1, 4), float(rank + 1))).sum().backward()
        assert all(row.reduces == 1 and not row.stock_calls for row in tide.report(model))
        return model.weight.grad.to_local().flatten().tolist()

    for values in run_ranks(4, body):
        assert values == [expected] * 8


def test_16_gradients_move_only_into_a_slot_that_holds_them() -> None:
    """Bytes copied by this rank tell: nothing moves while the group keeps its slot, nor gradients
    accumulated in fp32 beside bf16 parameters."""

    def body(rank: int, size: int) -> dict[str, int]:
        model = model_on_tide(MASTERS, memory_mode="slot_reuse")
        step(model)
        backend = record_of(group_of(model)).reduce_backend  # type: ignore[union-attr]
        moved: dict[str, int] = {}

        def measure(name: str) -> None:
            before = backend.counters()["bytes_copied"]
            step(model)
            moved[name] = backend.counters()["bytes_copied"] - before

        measure("moved")
        model.set_reshard_after_backward(False)
        measure("kept")
        model.set_reshard_after_backward(True)
        model.set_requires_gradient_sync(False)
        step(model)
        model.set_requires_gradient_sync(True)
        measure("accumulated")
        return moved

    for moved in run_ranks(2, body):
        gradients = sum(p.numel() for p in Model().parameters()) * 2
        assert moved["moved"] - moved["kept"] >= gradients, moved
        assert moved["accumulated"] == moved["kept"] or moved["accumulated"] < moved["moved"], moved


def test_17_nothing_waits_for_the_device() -> None:
    """The one number that a reduction reads back lies on the host, whatever the device."""
    record = record_for_test()
    call = reduce.ReduceCall(record, [], [], None)
    placeholder = call.allocate((8,), torch.bfloat16, torch.device("meta"))
    assert placeholder.device.type == "cpu" and placeholder.numel() == 1
    output = call.allocate((2,), torch.bfloat16, torch.device("meta"))
    assert output.device.type == "meta" and output.dtype == torch.bfloat16


def record_for_test() -> Any:
    from tide.fsdp.record import GroupRecord

    return GroupRecord("group")
