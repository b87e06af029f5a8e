"""Whole runs beside loader workers, interrupted, and killed at once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((16,), index / 48)


def model_on_tide() -> Any:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


def train(model: Any, loader: Any) -> list[float]:
    """One pass over the rows: workers are forked while gathers and reductions run."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in loader:
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_beside_loader_workers_changes_nothing() -> None:
    def body(rank: int, size: int) -> None:
        model = model_on_tide()
        plain = [train(model, DataLoader(Rows(), batch_size=4)) for _ in range(2)]
        model = model_on_tide()
        loader = DataLoader(Rows(), batch_size=4, num_workers=2, multiprocessing_context="fork")
        # The second time workers are forked anew, now from a rank with windows.
        assert [train(model, loader) for _ in range(2)] == plain

    run_ranks(2, body, timeout=150, group_timeout=120)


def test_workers_of_a_killed_rank_do_not_hide_its_death() -> None:
    def body(rank: int, size: int) -> str:
        model = model_on_tide()
        loader = DataLoader(
            Rows(),
            batch_size=4,
            num_workers=2,
            multiprocessing_context="fork",
            persistent_workers=True,
        )
        train(model, loader)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)  # its workers live on for some seconds
        with pytest.raises(dist.DistBackendError, match="rank 1") as caught:
            for _ in range(100):
                train(model, DataLoader(Rows(), batch_size=4))
        dist.distributed_c10d._abort_process_group()
        return str(caught.value)

    # The group's timeout is far beyond the run's: the death is heard.
    results = run_ranks(3, body, timeout=150, group_timeout=3000, dies={1: signal.SIGKILL})
    assert "group" in results[0] and "group" in results[2]


SCRIPT = """
import os, sys, pathlib
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

folder = pathlib.Path(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("tide")
rank = dist.get_rank()
model = fully_shard(nn.Linear(64, 64))
how = "ended"
try:
    for step in range(10**9):
        model(torch.ones(2, 64)).sum().backward()
        if step == 3:
            (folder / f"pid{rank}").write_text(str(os.getpid()))
except BaseException as error:
    how = type(error).__name__
    raise
finally:
    (folder / f"how{rank}").write_text(how)
"""


def start_run(folder: Path) -> subprocess.Popen[bytes]:
    """4 ranks under torchrun in a session of their own, all in the middle of training."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    with (folder / "log").open("wb") as log:
        run = subprocess.Popen(
            [*launcher, "--nproc-per-node=4", str(script), str(folder)],
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    deadline = time.monotonic() + 180
    while len(list(folder.glob("pid*"))) < 4 and run.poll() is None:
        if time.monotonic() > deadline:
            end(run)
            break
        time.sleep(0.05)
    assert run.poll() is None, (folder / "log").read_text()
    return run


def end(run: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def gone(folder: Path) -> bool:
    """Whether no rank is left, after some time for the kernel."""
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if not any(alive(pid, folder) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid: int, folder: Path) -> bool:
    """A process of this run: not another one that has its number now, nor one that only waits to
    be collected."""
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def test_an_interrupt_ends_a_run(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    run = start_run(tmp_path)
    try:
        os.killpg(run.pid, signal.SIGINT)  # what a terminal sends to all of them
        run.wait(timeout=120)
        assert gone(tmp_path)
        # torchrun kills what does not end by itself within 30 seconds; such a rank writes nothing.
        how = [(tmp_path / f"how{rank}").read_text() for rank in range(4)]
        assert set(how) <= {"KeyboardInterrupt", "DistBackendError"}, how
        assert "KeyboardInterrupt" in how
        assert set(os.listdir("/dev/shm")) <= shared
    finally:
        end(run)


def test_killing_all_leaves_nothing(tmp_path: Path) -> None:
    shared = set(os.listdir("/dev/shm"))
    run = start_run(tmp_path)
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*")]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # torchrun gives its ranks sessions of their own
    assert gone(tmp_path)
    assert not list(tmp_path.glob("how*"))
    assert set(os.listdir("/dev/shm")) <= shared
