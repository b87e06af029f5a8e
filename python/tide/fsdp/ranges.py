"""tide's work in torch.profiler: one range a call, named with group and bytes.

    tide::gather blocks.0 1835008 B     tide::wait for gather blocks.0     tide::reduce blocks.0 ...

The bytes are those that arrive on this rank. Without a profiler a range costs about a microsecond.
"""

from __future__ import annotations

from typing import Any

import torch

named: Any = getattr(torch._C._profiler, "_RecordFunctionFast", torch.profiler.record_function)
"""A context that shows as the text it is given."""


def gather(record: Any) -> Any:
    arriving = record.unsharded_bytes * (record.ranks - 1) // record.ranks
    return named(f"tide::gather {record.name} {arriving} B")


def wait_for_gather(record: Any) -> Any:
    return named(f"tide::wait for gather {record.name}")


def reduce(record: Any) -> Any:
    arriving = record.gradient_bytes * (record.ranks - 1) // record.ranks
    return named(f"tide::reduce {record.name} {arriving} B")
