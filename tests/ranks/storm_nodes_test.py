"""The storm (storm_test.py) in groups on several nodes, joined by UCX over the loopback: 4 nodes of
one rank, 2 of two, and fewer as ranks die.

TIDE_LONG_TESTS=1 makes more than 200 faults of it; TIDE_STORM_SEED chooses others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed.fsdp
import torch.distributed.tensor  # noqa: F401
from c10d_nodes_test import pytestmark  # noqa: F401  needs UCX
from storm import make_rounds
from storm_test import SECONDS, SEED, weather

RUNS = [4] * 24 if os.environ.get("TIDE_LONG_TESTS") else [4, 3]


def test_the_long_form_has_two_hundred_faults() -> None:
    rounds = [r for index in range(24) for r in make_rounds(SEED + index, 4, between_nodes=True)]
    bad = [r for r in rounds if r.kind != "peace"]
    assert len(bad) >= 200
    assert {r.node_size for r in bad} == {1, 2}
    assert {r.kind for r in bad} == {"kill", "stop", "exit", "raise", "skip", "sizes"}


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("index", range(len(RUNS)))
def test_storm_between_nodes(index: int, tmp_path: Path) -> None:
    weather(make_rounds(SEED + index, RUNS[index], between_nodes=True), tmp_path)
