"""One rank differs: in its settings, in the arguments of a call, or by leaving the first call out.

The others learn it soon, with the rank's name and what it did; ranks that are wrong together go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, folder, init_group, reduce_scatter_list, run_ranks
from tide import _C, groups


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except (RuntimeError, ValueError, TimeoutError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("knob", "field", "values"),
    [
        ("TIDE_FSDP", "fsdp", ("both", "gather")),
        ("TIDE_FSDP", "fsdp", ("both", "0")),
        ("TIDE_MEMORY_MODE", "memory_mode", ("in_place", "slot_reuse")),
        ("TIDE_COLLECTIVES", "own_collectives", ("1", "0")),
        ("TIDE_NODE_SIZE", "node_size", ("0", "1")),
        ("TIDE_SCHEDULE", "schedule", ("doubling", "ring")),
        ("TIDE_PACING", "pacing", ("confirm_head", "off")),
        ("TIDE_HEAD_BYTES", "head_bytes", ("8192", "65536")),
        ("TIDE_STAGING_SLICE", "staging_slice_bytes", ("8192", "65536")),
        ("TIDE_LANDING_SLICE", "landing_slice_bytes", ("8192", "65536")),
    ],
)
def test_settings_that_differ_are_an_error_on_all_ranks(
    knob: str, field: str, values: tuple[str, str]
) -> None:
    def body(rank: int, size: int) -> str:
        os.environ[knob] = values[rank == 1]
        return outcome(init_group)

    results = run_ranks(3, body, init=False, group_timeout=600, timeout=40)
    assert len(set(results)) == 1
    assert f"ValueError: {knob} (tide.Options.{field}) differs" in results[0]
    own = repr(int(values[1]) if values[1].isdecimal() and field != "fsdp" else values[1])
    others = repr(int(values[0]) if values[0].isdecimal() and field != "fsdp" else values[0])
    assert f"rank 1 has {own}" in results[0]
    assert f"rank 0 has {others}" in results[0] or f"rank 2 has {others}" in results[0]


def test_settings_of_a_further_group_are_compared_too() -> None:
    def body(rank: int, size: int) -> str:
        options = tide.Options(memory_mode="slot_reuse" if rank else "in_place")
        return outcome(lambda: dist.new_group(backend="tide", pg_options=options))

    results = run_ranks(2, body, group_timeout=600, timeout=40)
    assert results[0] == results[1] and "TIDE_MEMORY_MODE" in results[0]


def test_limits_may_differ() -> None:
    def body(rank: int, size: int) -> str:
        os.environ["TIDE_ARENA_LIMIT"] = str(rank << 30)
        os.environ["TIDE_FLIGHT_RECORD"] = str(16 + rank)
        return outcome(init_group)

    assert run_ranks(2, body, init=False) == ["no error"] * 2


def without_rank_1(call: Callable[[], Any]) -> Callable[[int, int], str]:
    """What each rank says of a call that rank 1 leaves out; it stays until the others have."""

    def body(rank: int, size: int) -> str:
        if rank == 1:
            while not (folder() / "over").exists():
                time.sleep(0.02)
            return ""
        result = outcome(call)
        (folder() / "over").touch()
        return result

    return body


def test_a_rank_that_does_not_come_to_make_the_group_is_named() -> None:
    body = without_rank_1(init_group)
    result = run_ranks(2, body, init=False, group_timeout=3, timeout=40)[0]
    assert "TimeoutError: ranks [1] of group" in result


def backend() -> _C.Backend:
    found = groups.of()
    assert found is not None
    return found


def planned() -> int:
    spec = _C.ParameterSpec("w", torch.float32, torch.float32, 8, 24)
    (answer,) = backend().plan([_C.PlanRequest("g", [spec], gradient_dtype=torch.float32)], 1)
    return int(answer.plan)


def gather(width: int = 1) -> None:
    all_gather_list([torch.zeros(3)], [torch.ones(width)]).wait()


def planned_reduce(width: int) -> None:
    backend().reduce(0, [0], [torch.ones(width)], torch.zeros(8), "sum", 1.0, False).wait()


def planned_gather(width: int) -> None:
    output = torch.empty(24)
    output.untyped_storage().resize_(0)
    work = backend().gather(0, [torch.ones(width)], [output])
    assert work is not None
    work.wait()
    backend().vacate(0)


# Each takes what is wrong on rank 1 (False elsewhere).
CALLS: dict[str, Callable[[bool], Any]] = {
    "all-gather": lambda wrong: gather(5 if wrong else 1),
    "reduce-scatter": lambda wrong: reduce_scatter_list(
        [torch.zeros(1)], [torch.ones(7 if wrong else 3)]
    ).wait(),
    "planned gather": lambda wrong: planned_gather(9 if wrong else 8),
    "planned reduce": lambda wrong: planned_reduce(9 if wrong else 24),
    "layout gather": lambda wrong: tide.GroupLayout((1,)).all_gather(
        [torch.zeros(3)], [torch.ones(5 if wrong else 1)]
    ),
    "empty": lambda wrong: backend().allocate([-4 if wrong else 4], torch.float32),
    "register": lambda wrong: tide.register(
        [torch.ones(3).to_sparse() if wrong else torch.ones(3)]
    ),
}


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_refused_on_one_rank_fails_on_the_others(name: str, first: bool) -> None:
    if first and name.startswith("planned"):
        pytest.skip("a plan is made before")

    def body(rank: int, size: int) -> tuple[str, float]:
        if not first:
            gather()
            assert planned() == 0
        start = time.monotonic()
        result = outcome(lambda: CALLS[name](rank == 1))
        seconds = time.monotonic() - start
        if rank == 1:  # the others must not learn it from this rank's end
            until = time.monotonic() + 20
            while len(list(folder().glob("over*"))) < size - 1 and time.monotonic() < until:
                time.sleep(0.02)
        (folder() / f"over{rank}").touch()
        dist.distributed_c10d._abort_process_group()
        return result, seconds

    results = run_ranks(3, body, group_timeout=600, timeout=60)
    refusal = results[1][0].partition(": ")[2].splitlines()[0].removeprefix("tide: ")
    assert "DistBackendError" not in results[1][0] and results[1][0] != "no error"
    for rank in (0, 2):
        result, seconds = results[rank]
        assert "DistBackendError" in result and "rank 1" in result, result
        assert refusal in result and "refused a call instead" in result, (refusal, result)
        assert seconds < 15


@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_refuse_the_same_call_go_on(first: bool) -> None:
    """However late one of them is."""

    def body(rank: int, size: int) -> None:
        if not first:
            gather()
        for round_ in range(2):
            for _ in range(2):
                assert "RuntimeError" in outcome(lambda: gather(5))
            if rank == 2 - round_:
                time.sleep(3.5)
            gather()

    run_ranks(3, body, group_timeout=600, timeout=60)


@pytest.mark.parametrize("first", [False, True])
def test_a_caller_may_come_with_a_better_call_at_once(first: bool) -> None:
    def body(rank: int, size: int) -> None:
        if not first:
            gather()
        if rank == 1:
            assert "RuntimeError" in outcome(lambda: gather(5))
        gather()
        if rank == 1:
            time.sleep(3.5)  # nobody holds the old mistake against it
        gather()

    run_ranks(3, body, group_timeout=600, timeout=60)


def test_a_rank_that_leaves_the_first_call_out_is_named() -> None:
    for result in run_ranks(3, without_rank_1(gather), group_timeout=3, timeout=40)[::2]:
        assert "DistBackendError" in result
        assert "rank 1 has not made its first call of this group before the deadline" in result
