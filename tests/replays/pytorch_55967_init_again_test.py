"""pytorch 55967, 74666.

init, destroy and init again with the same store hung, as the second life found the first one's
keys. Right: three lives work on one FileStore and on one TCPStore, with tide's own collectives in
each.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import all_gather_list, init_group, open_store, run_ranks


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_three_lives_on_one_store(kind: str) -> None:
    def body(rank: int, size: int) -> None:
        store = open_store()
        for life in range(3):
            init_group(store=store)
            outputs = [torch.zeros(size)]
            all_gather_list(outputs, [torch.full((1,), float(10 * life + rank))]).wait()
            assert outputs[0].tolist() == [10.0 * life + peer for peer in range(size)]
            total = torch.ones(1)
            dist.all_reduce(total)
            assert total.item() == size
            dist.destroy_process_group()

    run_ranks(3, body, init=False, store=kind)
