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


@functools.cache
def found(size: int) -> list[dict[str, Any]]:
    """Per rank: case -> what it found, or the traceback that ended it."""

    def body(rank: int, size: int) -> dict[str, Any]:
        prepare_device()
        results: dict[str, Any] = {}
        for name in [name for name in NAMES if CASES[name].ranks == size]:
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
    ranks = found(CASES[name].ranks)
    for rank, results in enumerate(ranks):
        assert name in results, f"rank {rank} ended in an earlier case"
        assert not isinstance(results[name], str), f"rank {rank}: {results[name][-3000:]}"
    if name in REFUSED:
        for results in ranks:
            for row in results[name]["tide"].report:
                assert row.path == "stock" and REFUSED[name] in row.reason
        return
    judge(CASES[name], tuple(VARIANTS), [results[name] for results in ranks])
