"""Flight records as files: on an error of tide's, and by signal. `tide explain` reads them.

A file a rank, next to PyTorch's own: TIDE_DUMP is the path before the rank; without it
`tide_trace_rank_` in the folder of TORCH_FR_DUMP_TEMP_FILE, or in /tmp. TIDE_DUMP_SIGNAL=10 (or
another number) dumps at that signal, as soon as the main thread is back in Python or waits in tide.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tide import knobs

logger = logging.getLogger("tide.dumps")

_backends: weakref.WeakSet[Any] = weakref.WeakSet()
_watched: set[int] = set()


def follow(backend: Any) -> None:
    """This backend's record is in every later dump."""
    _backends.add(backend)
    number = knobs.number("TIDE_DUMP_SIGNAL")
    if (
        number == 0
        or number in _watched
        or threading.current_thread() is not threading.main_thread()
    ):
        return
    before = signal.getsignal(number)

    def dump(received: int, frame: Any) -> None:
        write("signal")
        if callable(before):
            before(received, frame)

    signal.signal(number, dump)
    _watched.add(number)


def path(rank: int) -> Path:
    prefix = knobs.text("TIDE_DUMP")
    if not prefix:
        torch_names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        beside = next((os.environ[name] for name in torch_names if os.environ.get(name)), "/tmp/")
        prefix = str(Path(beside if not beside.endswith("/") else beside + "x").parent)
        prefix += "/tide_trace_rank_"
    return Path(f"{prefix}{rank}")


def write(why: str) -> Path | None:
    """Writes this rank's file; None where that fails, which is logged and never raised."""
    try:
        rank = dist.get_rank() if dist.is_initialized() else 0
        records = [json.loads(backend.flight_record()) for backend in list(_backends)]
        content = {
            "tide": 1,
            "why": why,
            "rank": rank,
            "ranks": dist.get_world_size() if dist.is_initialized() else 1,
            "host": platform.node(),
            "time": time.time(),
            "groups": [record for record in records if isinstance(record, dict)],
        }
        target = path(rank)
        partial = target.with_name(target.name + ".partial")
        partial.write_text(json.dumps(content))
        partial.replace(target)
    except (OSError, ValueError, RuntimeError) as error:
        logger.warning("the flight record was not written: %s", error)
        return None
    logger.warning("flight record of rank %d: %s (tide explain reads it)", rank, target)
    return target


@contextlib.contextmanager
def on_error() -> Iterator[None]:
    """Dumps when tide raises inside."""
    try:
        yield
    except dist.DistBackendError:
        write("error")
        raise
