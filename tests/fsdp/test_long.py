"""Fifty steps: losses stay within twice the distance of two stock runs that start an ulp apart, and
two runs on tide are equal bit for bit. TIDE_LONG_TESTS=1 does so for every configuration."""

import dataclasses
import os

import pytest
from cases import CASES
from trial import check

SHORT = ["masters", "bf16"]


@pytest.mark.parametrize("name", list(CASES) if os.environ.get("TIDE_LONG_TESTS") else SHORT)
def test_fifty_steps(name: str) -> None:
    check(dataclasses.replace(CASES[name], steps=50), ("tide",), reference="tide")
