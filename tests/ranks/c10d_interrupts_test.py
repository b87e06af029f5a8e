"""Ctrl-C ends each wait of a thread of the program with KeyboardInterrupt, soon."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, folder, reduce_scatter_list, run_ranks
from tide import _C, groups


def backend() -> _C.Backend:
    found = groups.of()
    assert found is not None
    return found


def gather_one() -> dist.Work:
    return all_gather_list([torch.zeros(2)], [torch.ones(1)])


def request() -> Any:
    spec = _C.ParameterSpec("w", torch.float32, torch.float32, 8, 16)
    return _C.PlanRequest("group", [spec], gradient_dtype=torch.float32, may_lease=False)


def planned() -> int:
    (answer,) = backend().plan([request()], 1)
    assert answer.accepted, answer.reason
    return int(answer.plan)


def reduce_work() -> Any:
    plan = planned()
    reduced = torch.zeros(8)
    return lambda: backend().reduce(plan, [0], [torch.ones(16)], reduced, "sum", 1.0, False)


def after_one(call: Callable[[], Any]) -> Callable[[], Callable[[], Any]]:
    """Both ranks have made the group and one gather."""

    def prepare() -> Callable[[], Any]:
        gather_one().wait()
        return call

    return prepare


def after_one_reduce() -> Callable[[], Any]:
    plan = planned()
    gradient, reduced = torch.ones(16), torch.zeros(8)

    def reduce() -> _C.ReduceWork:
        return backend().reduce(plan, [0], [gradient], reduced, "sum", 1.0, False)

    reduce().wait()
    return lambda: reduce().wait_read()


def fill_the_ring() -> None:
    for _ in range(600):
        gather_one()


# What both ranks do before; it returns the call that rank 0 makes alone.
WAITS: dict[str, Callable[[], Callable[[], Any]]] = {
    "the first call": lambda: gather_one,
    "the first empty": lambda: lambda: tide.empty(4),
    "empty": after_one(lambda: tide.empty(4)),
    "register": after_one(lambda: tide.register([torch.ones(4)])),
    "plan": after_one(planned),
    "the 513th operation": after_one(fill_the_ring),
    "making an area": after_one(lambda: reduce_scatter_list([torch.zeros(1)], [torch.ones(2)])),
    "wait": after_one(lambda: gather_one().wait()),
    "wait_read": after_one_reduce,
    "draining for empty": after_one(lambda: (gather_one(), tide.empty(4))),
    "draining for plan": after_one(lambda: (gather_one(), planned())),
}


def leave() -> None:
    """Without a farewell; the other ranks may stop waiting."""
    (folder() / "over").touch()
    dist.distributed_c10d._abort_process_group()


def stay_away() -> None:
    """Until the test is over, at most six seconds."""
    until = time.monotonic() + 6
    while not (folder() / "over").exists() and time.monotonic() < until:
        time.sleep(0.02)
    leave()


@pytest.mark.parametrize("wait", WAITS)
def test_an_interrupt_ends(wait: str) -> None:
    def body(rank: int, size: int) -> Any:
        call = WAITS[wait]()
        if rank == 1:
            return stay_away()
        interrupt = threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        start = time.monotonic()
        try:
            call()
            outcome = "no interrupt"
        except KeyboardInterrupt:
            outcome = "interrupted"
        except dist.DistBackendError as error:
            outcome = str(error)
        seconds = time.monotonic() - start
        interrupt.join()
        leave()
        return outcome, seconds

    outcome, seconds = run_ranks(2, body, group_timeout=600, timeout=60)[0]
    assert outcome == "interrupted"
    assert seconds < 4  # the other rank would end the wait after six


def test_an_interrupted_meeting_ends_the_peers_too() -> None:
    """Ranks that wait in the same call hear of it and do not wait for their timeouts."""

    def body(rank: int, size: int) -> str:
        gather_three = [torch.zeros(3)]
        all_gather_list(gather_three, [torch.ones(1)]).wait()
        if rank == 2:
            stay_away()
            return "stayed away"
        if rank == 0:
            threading.Timer(0.7, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            tide.empty(4)
            outcome = "no error"
        except KeyboardInterrupt:
            outcome = "interrupted"
        except dist.DistBackendError as error:
            outcome = str(error)
        if rank == 1:
            leave()
        return outcome

    results = run_ranks(3, body, group_timeout=600, timeout=60)
    assert results[0] == "interrupted"
    assert "rank 0" in results[1] and "a signal handler" in results[1]


def test_a_handler_may_destroy_the_group_inside_a_wait() -> None:
    def body(rank: int, size: int) -> str:
        gather_one().wait()
        if rank == 1:
            stay_away()
            return "stayed away"

        def handler(*_: Any) -> None:
            dist.destroy_process_group()

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            tide.empty(4)
        except dist.DistBackendError as error:
            (folder() / "over").touch()
            return str(error)
        return "no error"

    results = run_ranks(2, body, group_timeout=600, timeout=60)
    assert "closed during a call" in results[0]
