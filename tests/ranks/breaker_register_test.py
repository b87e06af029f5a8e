"""Lists are registered while gathers into them are on their way."""

from __future__ import annotations

import tide
import torch
from harness import all_gather_list, run_ranks

LARGE = 2_000_000
SMALL = 2_000


def test_registering_waits_for_gathers_into_the_list() -> None:
    def body(rank: int, size: int) -> None:
        large = [torch.zeros(LARGE * size)]
        small = [torch.zeros(SMALL * size)]
        all_gather_list([torch.zeros(size)], [torch.ones(1)]).wait()
        # The large ones keep the lane busy: the small one has not begun when its list moves.
        works = [all_gather_list(large, [torch.ones(LARGE)]) for _ in range(8)]
        works.append(all_gather_list(small, [torch.full((SMALL,), float(rank + 1))]))
        tide.register(small)
        for work in works:
            work.wait()
        wanted = [float(peer + 1) for peer in range(size) for _ in range(SMALL)]
        assert small[0].tolist() == wanted

    run_ranks(2, body)
