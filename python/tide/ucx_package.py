"""The UCX that a Python package brings: libucx-cu13 and its kin, which all install `libucx`."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path


@functools.cache
def packaged_ucx() -> list[str]:
    """Files to try where the system has no libucp.so.0; empty without such a package."""
    spec = find_spec("libucx")
    folders = (spec.submodule_search_locations or []) if spec else []
    files = [Path(folder) / "lib" / "libucp.so.0" for folder in folders]
    return [str(file) for file in files if file.exists()]
