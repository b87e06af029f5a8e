"""The configurations once more with all ranks on one GPU, `TIDE_TEST_DEVICE=cuda`.

A rank's start takes longer there than its training: one set of ranks of each size tries all cases
of that size, and the tests look at what it found. A case in which a rank raises ends its set.
"""

from __future__ import annotations

import functools
import os
import traceback
from typing import Any

import pytest
import torch
from cases import CASES
from harness import run_ranks
from trial import DEVICE, ENVIRONMENT, TORCH, VARIANTS, judge, prepare_device, tried

pytestmark = pytest.mark.skipif(DEVICE != "cuda", reason="TIDE_TEST_DEVICE=cuda chooses the GPU")
# ci/device runs several processes, each a part of the list.
PART = int(os.environ.get("TIDE_TEST_PART", "0"))
PARTS = int(os.environ.get("TIDE_TEST_PARTS", "1"))
NAMES = [name for name, case in CASES.items() if case.since <= TORCH][PART::PARTS]

REFUSED = {"fp64": "gradients of fp64 cannot be summed on a GPU"}


def found(name: str) -> list[dict[str, Any]]:
    """Per rank: case -> what it found, or the traceback that ended it."""
    case = CASES[name]
    if case.keeps_groups:  # DTensor would meet the ended groups of other cases: ranks of its own
        return run_cases((name,), case.ranks)
    together = [n for n in NAMES if CASES[n].ranks == case.ranks and not CASES[n].keeps_groups]
    return run_cases(tuple(together), case.ranks)


@functools.cache
def run_cases(names: tuple[str, ...], size: int) -> list[dict[str, Any]]:

    def body(rank: int, size: int) -> dict[str, Any]:
        prepare_device()
        results: dict[str, Any] = {}
        for name in names:
            print(name, flush=True)
            try:
                results[name] = tried(CASES[name], tuple(VARIANTS))
            except Exception:
                results[name] = traceback.format_exc()
                break
            torch.cuda.synchronize()
        return results

    return run_ranks(size, body, timeout=400, group_timeout=60, environment=ENVIRONMENT)


@pytest.mark.timeout(450)
@pytest.mark.parametrize("name", NAMES)
def test_trains_like_stock_on_a_gpu(name: str) -> None:
    ranks = found(name)
    for rank, results in enumerate(ranks):
        assert name in results, f"rank {rank} ended in an earlier case"
        assert not isinstance(results[name], str), f"rank {rank}: {results[name][-3000:]}"
    if name in REFUSED:
        for results in ranks:
            for row in results[name]["tide"].report:
                assert row.path == "stock" and REFUSED[name] in row.reason
        return
    judge(CASES[name], tuple(VARIANTS), [results[name] for results in ranks])
