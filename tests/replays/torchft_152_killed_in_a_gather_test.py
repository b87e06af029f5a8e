"""torchft 152, DeepEP 570.

A rank is killed while the others are in the middle of a gather with it. Right: they raise long
before the timeout, naming the group, the operation and the rank; no thread of the group is left;
nothing is left in /dev/shm.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, run_ranks

NUMEL = 1 << 20


def threads() -> list[str]:
    return sorted(p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm"))


def test_the_others_name_it_and_go_on() -> None:
    def body(rank: int, size: int) -> str:
        before = threads()
        group = dist.new_group(backend="tide")
        outputs = [tide.empty(size * NUMEL, group=group)]
        # The killed rank has a call in flight whose bytes are on their way.
        if rank == 1:
            all_gather_list(outputs, [torch.ones(NUMEL)], group)
            os.kill(os.getpid(), signal.SIGKILL)
        message = ""
        for _ in range(3):
            try:
                all_gather_list(outputs, [torch.ones(NUMEL)], group).wait()
            except dist.DistBackendError as error:
                message = str(error)
                break
        group.abort()
        del group
        dist.distributed_c10d._abort_process_group()
        left = [name for name in threads() if name.startswith("tide")]
        assert not left, (before, left)
        return message

    shared = set(os.listdir("/dev/shm"))
    results = run_ranks(4, body, group_timeout=600, dies={1: signal.SIGKILL})
    for rank in (0, 2, 3):
        assert "rank 1" in results[rank] and "gather" in results[rank], results
        assert "group '" in results[rank], results
    assert set(os.listdir("/dev/shm")) <= shared
