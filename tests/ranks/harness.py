"""Runs a function as N ranks: processes forked from this one, which has imported torch already.

    def test_sum() -> None:
        def body(rank: int, size: int) -> float:
            tensor = torch.ones(3)
            dist.all_reduce(tensor)
            return tensor[0].item()

        assert run_ranks(4, body) == [4.0] * 4

`body` may be a closure: it is forked, not pickled. Its result is pickled back. Any exception,
signal or time-out of a rank fails the test and shows what every rank printed, with tracebacks of
all threads of those that hung.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import random
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import tide
import tide._C  # noqa: F401
import torch
import torch.distributed as dist

GRACE_SECONDS = 10.0
"""How long the other ranks may take once one has failed."""


class RankFailure(AssertionError):
    """What went wrong in which ranks."""


@dataclass
class _Run:
    """What a rank needs to know about its run; one per process, set before the body starts."""

    size: int
    store_kind: str
    folder: Path
    port: int
    group_timeout: timedelta


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    log: Path
    received: bytearray = field(default_factory=bytearray)
    status: int | None = None


_run: _Run | None = None


def run_ranks(
    size: int,
    body: Callable[[int, int], Any],
    *,
    backend: str = "tide",
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    store: str = "file",
    init: bool = True,
    options: Callable[[], Any] | None = None,
    environment: Mapping[str, str] | None = None,
    dies: Mapping[int, int] | None = None,
) -> list[Any]:
    """Runs ``body(rank, size)`` in `size` ranks and returns their results in rank order.

    backend, options, group_timeout: for ``init_process_group`` (options is called in each rank);
    init=False leaves the group to the body, which gets its store from ``open_store()``. The default
    group is destroyed after the body.
    store: "file" or "tcp". timeout: seconds for the whole run. environment: set in the ranks only.
    dies: rank -> signal that must end it; its result is None.
    """
    dies = dies or {}
    with tempfile.TemporaryDirectory(prefix="tide-ranks-") as name:
        folder = Path(name)
        run = _Run(size, store, folder, _free_port(), timedelta(seconds=group_timeout))
        sys.stdout.flush()
        sys.stderr.flush()
        children: list[_Child] = []
        try:
            for rank in range(size):
                children.append(
                    _fork(rank, run, body, backend, init, options, environment or {}, timeout)
                )
            timed_out = _wait(children, time.monotonic() + timeout, dies)
        finally:
            _end(children)
        return _judge(children, dies, timed_out)


def open_store() -> dist.Store:
    """A new connection to this run's store, from inside a body. Every rank that opens it must do
    so."""
    assert _run is not None, "open_store() is for bodies of run_ranks"
    if _run.store_kind == "file":
        return dist.FileStore(str(_run.folder / "store"), _run.size)
    rank = int(os.environ["RANK"])
    return dist.TCPStore("127.0.0.1", _run.port, _run.size, rank == 0, timeout=_run.group_timeout)


def folder() -> Path:
    """A directory that all ranks of this run share; gone after the run."""
    assert _run is not None, "folder() is for bodies of run_ranks"
    return _run.folder


def init_group(backend: str = "tide", **keywords: Any) -> None:
    """``init_process_group`` with this run's store, rank, size and time-out, unless `keywords` say
    otherwise."""
    assert _run is not None, "init_group() is for bodies of run_ranks"
    keywords.setdefault("store", open_store() if "store" not in keywords else None)
    keywords.setdefault("timeout", _run.group_timeout)
    dist.init_process_group(backend, rank=int(os.environ["RANK"]), world_size=_run.size, **keywords)


def all_gather_list(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], group: Any = None
) -> dist.Work:
    """c10d's coalesced all-gather under the name that this torch has for it."""
    group = group or dist.group.WORLD
    new = getattr(group, "all_gather_single_coalesced", None)
    return (new or group.allgather_into_tensor_coalesced)(outputs, inputs)


def reduce_scatter_list(
    outputs: list[torch.Tensor], inputs: list[torch.Tensor], op: Any = None, group: Any = None
) -> dist.Work:
    """c10d's coalesced reduce-scatter under the name that this torch has for it."""
    group = group or dist.group.WORLD
    options = dist.ReduceScatterOptions()
    if op is not None:
        options.reduceOp = op
    new = getattr(group, "reduce_scatter_single_coalesced", None)
    return (new or group.reduce_scatter_tensor_coalesced)(outputs, inputs, options)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fork(
    rank: int,
    run: _Run,
    body: Callable[[int, int], Any],
    backend: str,
    init: bool,
    options: Callable[[], Any] | None,
    environment: Mapping[str, str],
    timeout: float,
) -> _Child:
    read_end, write_end = os.pipe()
    log = run.folder / f"rank{rank}.log"
    pid = os.fork()
    if pid != 0:
        os.close(write_end)
        return _Child(rank, pid, read_end, log)
    status = 1
    try:
        os.close(read_end)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        # pytest replaced these objects; the rank writes to its own log.
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        faulthandler.enable(file=2, all_threads=True)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        result = _rank_main(rank, run, body, backend, init, options, environment)
        _write_all(write_end, pickle.dumps(result))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        _leave(status)
    raise AssertionError("unreachable")


def _rank_main(
    rank: int,
    run: _Run,
    body: Callable[[int, int], Any],
    backend: str,
    init: bool,
    options: Callable[[], Any] | None,
    environment: Mapping[str, str],
) -> Any:
    global _run
    _run = run
    os.environ.update(environment)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run.size))
    if "TORCH_DISTRIBUTED_DEBUG" in environment:
        dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    if init:
        init_group(backend, pg_options=options() if options else None)
    result = body(rank, run.size)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _leave(status: int) -> NoReturn:
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _write_all(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    os.close(descriptor)


def _wait(children: list[_Child], deadline: float, dies: Mapping[int, int]) -> bool:
    """Until all have ended; True when time ran out (then stacks of those still running are in their
    logs)."""
    selector = selectors.DefaultSelector()
    for child in children:
        selector.register(child.pipe, selectors.EVENT_READ, child)
    running = set(range(len(children)))
    while running and time.monotonic() < deadline:
        for key, _ in selector.select(timeout=0.02):
            child = key.data
            chunk = os.read(child.pipe, 1 << 20)
            if chunk:
                child.received += chunk
            else:
                selector.unregister(child.pipe)
        for index in list(running):
            child = children[index]
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.status = status
                running.remove(index)
                if not _ended_well(child, dies):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for child in children:
        # What was written before the end may still be in the pipe.
        os.set_blocking(child.pipe, False)
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(child.pipe, 1 << 20):
                child.received += chunk
    selector.close()
    if not running:
        return False
    for index in running:
        os.kill(children[index].pid, signal.SIGCONT)
        os.kill(children[index].pid, signal.SIGUSR1)
    time.sleep(1.0)
    return True


def _end(children: list[_Child]) -> None:
    for child in children:
        if child.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)
        os.close(child.pipe)


def _ended_well(child: _Child, dies: Mapping[int, int]) -> bool:
    assert child.status is not None
    if child.rank in dies:
        return os.WIFSIGNALED(child.status) and os.WTERMSIG(child.status) == dies[child.rank]
    return os.WIFEXITED(child.status) and os.WEXITSTATUS(child.status) == 0


def _judge(children: list[_Child], dies: Mapping[int, int], timed_out: bool) -> list[Any]:
    bad = [c for c in children if c.status is None or not _ended_well(c, dies)]
    if not bad:
        return [None if c.rank in dies else pickle.loads(bytes(c.received)) for c in children]
    parts = []
    for child in children:
        log = child.log.read_text(errors="replace") if child.log.exists() else ""
        parts.append(f"--- rank {child.rank}: {_describe(child)}\n{log[-12000:].rstrip()}")
    names = ", ".join(f"rank {c.rank} {_describe(c)}" for c in bad)
    head = "ranks did not end in time" if timed_out else "ranks failed"
    raise RankFailure(f"{head}: {names}\n" + "\n".join(parts))


def _describe(child: _Child) -> str:
    if child.status is None:
        return "was still running"
    if os.WIFSIGNALED(child.status):
        return f"ended by signal {signal.Signals(os.WTERMSIG(child.status)).name}"
    return f"ended with status {os.WEXITSTATUS(child.status)}"
