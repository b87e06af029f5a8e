"""The compiled simulator."""

from __future__ import annotations

from typing import Any

from tide.look import BadInput


def native() -> Any:
    """`tide._C`; torch is imported before it, for the libraries that the module names."""
    try:
        import torch  # noqa: F401

        from tide import _C
    except ImportError as error:
        raise BadInput(f"the compiled part of tide cannot be loaded: {error}") from None
    return _C
