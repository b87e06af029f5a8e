"""Every configuration that tide serves, both directions, In-Place: see trial.py for what must
hold."""

import pytest
from cases import CASES
from trial import check


@pytest.mark.parametrize("name", list(CASES))
def test_trains_like_stock(name: str) -> None:
    check(CASES[name])
