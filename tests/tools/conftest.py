"""What the tests of the verbs share: running `tide` as its users do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tide import look

Tide = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tide(tmp_path: Path) -> Tide:
    """Runs `tide ARGUMENTS...` in a folder of its own and returns what it said."""

    def run(
        *arguments: str | Path, seconds: float = 120, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tide.cli", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **environment},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    return run


@pytest.fixture
def torchrun(tmp_path: Path) -> Tide:
    """Runs `torchrun ARGUMENTS...` on so many ranks of this host, there, and returns what it
    said."""

    def run(
        ranks: int, *program: str | Path, seconds: float = 200
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            look.torchrun(ranks, *map(str, program)),
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    return run
