"""Fifty steps: losses stay within twice the distance of two stock runs, one ulp apart at the
start."""

import dataclasses

import pytest
from cases import CASES
from trial import check

NAMES = ["fp32", "bf16", "masters", "hsdp_masters", "accumulation_without_sync", "mixed_dtypes"]


@pytest.mark.parametrize("name", NAMES)
def test_fifty_steps(name: str) -> None:
    check(dataclasses.replace(CASES[name], steps=50), ("tide",))
