"""How inner backends are made, with stand-ins where there is no GPU: the same for every torch."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import tide.options
import torch
import torch.distributed as dist
from tide.inner_backends import inner_factory
from torch.distributed import distributed_c10d


class StandInNccl:
    """Keeps what ProcessGroupNCCL would be made with."""

    class Options(SimpleNamespace):
        pass

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        self.rank, self.size, self.options = rank, size, options


def nccl_made(monkeypatch: pytest.MonkeyPatch, split_from: Any) -> Any:
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", StandInNccl, raising=False)
    monkeypatch.delitem(distributed_c10d.Backend._plugins, "NCCL", raising=False)
    if hasattr(distributed_c10d.Backend, "_ensure_backend_registered"):
        monkeypatch.setattr(
            distributed_c10d.Backend, "_ensure_backend_registered", lambda name: None
        )
    options = tide.options.completed(tide.Options(inner_cuda="nccl"), timedelta(seconds=20))
    options.group_name = "a"
    options.global_ranks_in_group = [0]
    return inner_factory(dist.HashStore(), 0, 1, options, split_from)("cuda")


def test_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    made = nccl_made(monkeypatch, None)
    assert (made.rank, made.size) == (0, 1)
    assert made.options._timeout == timedelta(seconds=30), "the group's and a grace"
    assert made.options.global_ranks_in_group == [0]
    assert not hasattr(made.options, "split_from")


def test_nccl_split_off_another(monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(distributed_c10d._DistributedBackendOptions(), "split_from"):
        pytest.skip(f"torch {torch.__version__} takes c10d's own backends only to split from")
    other = object()
    made = nccl_made(monkeypatch, other)
    assert made.options.split_from is other
    assert made.options.split_color == distributed_c10d._process_group_color([0])


def test_tide_within_tide_is_refused() -> None:
    options = tide.options.completed(tide.Options(inner_cuda="tide"), timedelta(seconds=20))
    with pytest.raises(RuntimeError, match="cannot be tide itself"):
        inner_factory(dist.HashStore(), 0, 1, options)("cuda")
