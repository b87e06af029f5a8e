"""pytorch 132696, 151159.

Rank 2 is stuck before a collective of the group [2, 3]; the others had no way to tear everything
down and start again. Right: abort returns while rank 3 still waits in that collective, which ends
with an error; ranks 0, 1 and 3 make a new group and work on.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from harness import all_gather_list, folder, init_group, run_ranks


def gather(group: dist.ProcessGroup) -> list[float]:
    outputs = [torch.zeros(group.size())]
    all_gather_list(outputs, [torch.full((1,), float(group.rank()))], group).wait()
    return outputs[0].tolist()


def test_the_others_start_again() -> None:
    def body(rank: int, size: int) -> str:
        init_group(timeout=timedelta(seconds=600))
        assert gather(dist.group.WORLD) == [0.0, 1.0, 2.0, 3.0]
        pair = dist.new_group([2, 3])
        message = ""
        if rank >= 2:
            assert gather(pair) == [0.0, 1.0]
        if rank == 2:
            while not (folder() / "done").exists():
                time.sleep(0.02)
            return ""
        if rank == 3:
            caught: list[str] = []

            def wait() -> None:
                try:
                    gather(pair)
                except dist.DistBackendError as error:
                    caught.append(str(error))

            waiting = threading.Thread(target=wait)
            waiting.start()
            time.sleep(0.5)
            dist.distributed_c10d._abort_process_group()
            waiting.join()
            message = caught[0]
        else:
            dist.distributed_c10d._abort_process_group()
        members = {0: 0, 1: 1, 3: 2}
        dist.init_process_group(
            "tide",
            store=dist.FileStore(str(folder() / "again"), 3),
            rank=members[rank],
            world_size=3,
            timeout=timedelta(seconds=60),
        )
        assert gather(dist.group.WORLD) == [0.0, 1.0, 2.0]
        dist.barrier()
        if rank == 3:
            (folder() / "done").touch()
        return message

    def ends(rank: int, size: int) -> str:
        result = body(rank, size)
        if rank == 2:
            dist.distributed_c10d._abort_process_group()
        return result

    results = run_ranks(4, ends, init=False, timeout=120)
    assert results[3] != "" and "group" in results[3]
