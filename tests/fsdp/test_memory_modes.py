"""In-Place and Slot-Reuse: when the next gather may go, and when the gradients' memory is free."""

from __future__ import annotations

import time
import weakref
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import run_ranks
from lowlevel import gathered, plan_groups, start_gather, vacated
from models import WORDS, Model, loss_of
from spy import watching
from torch.distributed.fsdp import fully_shard
from trial import Setting


@pytest.mark.parametrize("slot_reuse", [False, True])
def test_the_next_gather_beside_a_reduction(slot_reuse: bool) -> None:
    """The ring has one slot, and the next gather takes it while the reduction is in flight.

    In-Place that gather is issued although a peer has not begun to reduce. In Slot-Reuse the
    gradients lie in the slot: the gather must not write there before they were read, whoever is
    late.
    """

    def body(rank: int, size: int) -> bool:
        backend: Any = tide.of()
        first, second = plan_groups(backend, 3000, 3000, depth=0)
        for turn in range(12):
            vacated(backend, first, gathered(backend, first, torch.zeros(3000), slot=0))
            gradient = torch.arange(3000.0 * size) + rank
            dist.barrier()
            if turn % size == rank:
                time.sleep(0.05)
            output = torch.empty(3000)
            work = backend.reduce(first, [0], [gradient], output, "sum", 1.0, slot_reuse)
            shard = torch.full((3000,), float(turn * size + rank))
            whole, gather = start_gather(backend, second, shard)
            assert gather.slot == 0
            if turn % size != rank and size == 2:
                assert not work.is_completed()
            work.wait_read()
            gradient.fill_(torch.nan)
            gather.wait()
            work.wait()
            expected = size * torch.arange(3000.0 * size) + sum(range(size))
            assert torch.equal(output, expected[rank * 3000 : (rank + 1) * 3000])
            for peer in range(size):
                part = whole[peer * 3000 : (peer + 1) * 3000]
                assert bool((part == turn * size + peer).all())
            vacated(backend, second, whole)
        return True

    assert all(run_ranks(2, body))
    assert all(run_ranks(4, body))


def test_slot_reuse_frees_gradients_before_the_network_part() -> None:
    """Of a whole FSDP2 backward: when the reduction returns to be waited for, gradients are
    gone."""

    def body(rank: int, size: int) -> int:
        torch.manual_seed(0)
        model = Model()
        mesh = Setting("tide:memory_mode=slot_reuse").mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        freed = 0
        alive: list[weakref.ref[torch.Tensor]] = []

        class Waiting:
            """Stands for the work; at its last wait the gradients must be gone."""

            def __init__(self, work: Any) -> None:
                self.work = work
                self.wait_read = work.wait_read

            def wait(self) -> None:
                nonlocal freed
                assert all(reference() is None for reference in alive)
                freed += len(alive)
                alive.clear()
                self.work.wait()

        def note(call: Any) -> None:
            if call.name == "reduce":
                alive.extend(weakref.ref(gradient) for gradient in call.arguments[1])

        with watching() as spy:
            spy.on_call = note
            spy.replace = lambda call: Waiting(call.work) if call.name == "reduce" else None
            for _ in range(2):
                loss_of(model, torch.randint(0, WORDS, (2, 7))).backward()
        return freed

    assert run_ranks(2, body) == [2 * (4 * 7 + 2)] * 2
