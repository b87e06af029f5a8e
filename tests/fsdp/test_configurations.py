"""Every configuration that tide serves, both directions, In-Place: see trial.py for what must
hold."""

import os

import pytest
from cases import CASES
from trial import check

# ci/device runs several processes, each a part of the list.
PART = int(os.environ.get("TIDE_TEST_PART", "0"))
PARTS = int(os.environ.get("TIDE_TEST_PARTS", "1"))


@pytest.mark.parametrize("name", list(CASES)[PART::PARTS])
def test_trains_like_stock(name: str) -> None:
    check(CASES[name])
