"""The configurations on several nodes: two of two ranks (one rank each where there are two or three
ranks), joined by UCX over the loopback. Sums equal the reference's in the nodes' order, bit for
bit.

TIDE_LONG_TESTS=1 runs all of them."""

import os

import pytest
from c10d_nodes_test import pytestmark  # noqa: F401  needs UCX
from cases import CASES
from trial import check

SHORT = ["masters", "hsdp_masters", "three_ranks", "columns_bf16", "accumulation"]


@pytest.mark.parametrize("name", list(CASES) if os.environ.get("TIDE_LONG_TESTS") else SHORT)
def test_trains_on_several_nodes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    monkeypatch.setenv("TIDE_NODE_SIZE", "2" if case.ranks == 4 else "1")
    check(case)
