"""Streams of the device that a group lives on. The CPU has none: its calls wait for themselves."""

from __future__ import annotations

import contextlib
from typing import Any

import torch


def current_stream(device: torch.device) -> Any:
    """The calling thread's stream on a GPU, None on the CPU."""
    if device.type == "cpu":
        return None
    return torch.get_device_module(device).current_stream(device)


def on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes it the current stream; nothing for None."""
    if stream is None:
        return contextlib.nullcontext()
    return torch.get_device_module(stream.device).stream(stream)
