"""Forked children free tensors that they got from their parent."""

from __future__ import annotations

import gc
import os

import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, run_ranks


def test_a_forked_child_may_free_tensors_of_tides_own_memory() -> None:
    def body(rank: int, size: int) -> list[float]:
        held = [tide.empty(6), torch.zeros(6)]
        tide.register(held[1:])
        pid = os.fork()
        if pid == 0:
            held.clear()
            gc.collect()
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"the child ended with status {status}"
        # The parent's tensors are still its own: what the child freed is not given to others.
        other = tide.empty(6)
        other.fill_(-1.0)
        all_gather_list(held, [torch.full((6 // size,), float(rank))] * 2).wait()
        assert torch.equal(held[0], held[1])
        dist.barrier()
        return held[0].tolist()

    assert run_ranks(2, body) == [[0.0] * 3 + [1.0] * 3] * 2
