"""What happens to the tide backend when a rank dies, raises, forks, aborts or is interrupted."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, init_group, open_store, run_ranks


def gather(group: Any = None) -> list[float]:
    """One small all-gather of tide's own; what it should give is rank_numbers()."""
    group = group or dist.group.WORLD
    outputs = [torch.zeros(2 * group.size())]
    all_gather_list(outputs, [torch.full((2,), float(group.rank()))], group).wait()
    return outputs[0].tolist()


def rank_numbers(size: int) -> list[float]:
    return [float(rank) for rank in range(size) for _ in range(2)]


def test_a_killed_rank_is_noticed_before_the_timeout() -> None:
    def body(rank: int, size: int) -> None:
        gather()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError, match=r"group '0'.*rank 1"):
            gather()
            gather()
        with pytest.raises(dist.DistBackendError):
            gather()

    # The group's time-out is ten minutes: the run ends because the death is noticed.
    run_ranks(
        3,
        lambda rank, size: quiet_end(body, rank, size),
        group_timeout=600,
        dies={1: signal.SIGKILL},
    )


def quiet_end(body: Any, rank: int, size: int) -> Any:
    """Runs a body whose group is broken, and drops the group without its farewell."""
    result = body(rank, size)
    dist.distributed_c10d._abort_process_group()
    return result


def test_a_rank_that_raises_ends_the_others() -> None:
    def body(rank: int, size: int) -> str:
        gather()
        try:
            if rank == 1:
                raise KeyError("a mistake in this rank's script")
            gather()
        except KeyError:
            dist.destroy_process_group()
            return "raised"
        except dist.DistBackendError as error:
            dist.destroy_process_group()
            return str(error)
        return "no error"

    results = run_ranks(3, body, group_timeout=600)
    assert results[1] == "raised"
    for rank in (0, 2):
        assert "rank 1" in results[rank], results


def test_a_rank_that_never_comes_is_a_timeout() -> None:
    def body(rank: int, size: int) -> str:
        gather()
        if rank == 1:
            time.sleep(8)
            return ""
        with pytest.raises(dist.DistBackendError, match=r"timeout.*group '0'.*rank 1") as caught:
            gather()
        return str(caught.value)

    run_ranks(2, lambda rank, size: quiet_end(body, rank, size), group_timeout=3)


def test_a_first_call_that_one_rank_skips_is_a_timeout() -> None:
    def body(rank: int, size: int) -> None:
        if rank == 1:
            time.sleep(8)
            return
        with pytest.raises(dist.DistBackendError, match="timeout"):
            gather()
        # What failed once stays failed: ranks may not disagree about who is in.
        with pytest.raises(dist.DistBackendError, match="timeout"):
            gather()

    run_ranks(2, lambda rank, size: quiet_end(body, rank, size), group_timeout=3)


def test_abort_returns_and_a_new_group_works() -> None:
    def body(rank: int, size: int) -> None:
        store = open_store()
        init_group(store=store, timeout=timedelta(seconds=600))
        assert gather() == rank_numbers(size)
        if rank == 0:
            # A call that the others never join, then abort.
            work = all_gather_list([torch.zeros(2 * size)], [torch.zeros(2)])
            store.set("issued", "")
        store.wait(["issued"])
        group = dist.group.WORLD
        dist.distributed_c10d._abort_process_group()
        if rank == 0:
            with pytest.raises(dist.DistBackendError):
                work.wait()
        with pytest.raises(dist.DistBackendError):
            gather(group)
        init_group(store=store)
        assert gather() == rank_numbers(size)

    run_ranks(3, body, init=False)


def test_destroy_with_calls_in_flight_returns() -> None:
    def body(rank: int, size: int) -> None:
        gather()
        works = []
        if rank == 0:
            works.append(all_gather_list([torch.zeros(2 * size)], [torch.zeros(2)]))
        dist.destroy_process_group()
        gc.collect()
        for work in works:
            with pytest.raises(dist.DistBackendError):
                work.wait()

    run_ranks(2, body, group_timeout=600)


def test_calls_after_destroy_raise() -> None:
    def body(rank: int, size: int) -> None:
        gather()
        group = dist.group.WORLD
        dist.destroy_process_group()
        with pytest.raises(dist.DistBackendError, match="closed"):
            gather(group)

    run_ranks(2, body)


def test_a_forked_child_gets_an_error_and_goes() -> None:
    def body(rank: int, size: int) -> None:
        gather()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            message = "no error"
            try:
                gather()
            except dist.DistBackendError as error:
                message = str(error)
            try:
                dist.all_reduce(torch.ones(1))
            except dist.DistBackendError as error:
                message += " | " + str(error)
            os.write(write_end, message.encode())
            # Python's own teardown in the child must not wait for threads that only the parent has.
            dist.destroy_process_group()
            gc.collect()
            os._exit(0)
        os.close(write_end)
        message = b""
        while chunk := os.read(read_end, 4096):
            message += chunk
        _, status = os.waitpid(pid, 0)
        assert status == 0
        assert message.decode().count("was forked from it") == 2, message
        assert gather() == rank_numbers(size)

    run_ranks(2, body)


def test_loader_workers_do_not_disturb() -> None:
    class Numbers(torch.utils.data.Dataset[torch.Tensor]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor(float(index))

    def body(rank: int, size: int) -> None:
        gather()
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)
        total = 0.0
        for batch in loader:
            total += float(batch.sum())
            assert gather() == rank_numbers(size)
        assert total == sum(range(40))

    run_ranks(2, body)


def test_an_interrupt_ends_a_wait_at_once() -> None:
    def body(rank: int, size: int) -> str:
        gather()
        if rank == 1:
            time.sleep(3)  # the others wait for this rank meanwhile
            return "slept"
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        start = time.monotonic()
        try:
            gather()
        except KeyboardInterrupt:
            return "interrupted" if time.monotonic() - start < 2.9 else "late"
        return "no interrupt"

    results = run_ranks(
        2, lambda rank, size: quiet_end(body, rank, size), group_timeout=600, timeout=40
    )
    assert results == ["interrupted", "slept"]


def test_an_interrupt_ends_the_wait_for_the_first_call() -> None:
    def body(rank: int, size: int) -> str:
        if rank == 1:
            time.sleep(3)
            return "slept"
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            gather()
        except KeyboardInterrupt:
            return "interrupted"
        return "no interrupt"

    results = run_ranks(
        2, lambda rank, size: quiet_end(body, rank, size), group_timeout=600, timeout=40
    )
    assert results == ["interrupted", "slept"]


def test_nothing_is_left_in_shared_memory() -> None:
    before = set(os.listdir("/dev/shm"))

    def body(rank: int, size: int) -> None:
        tensor = tide.empty(1000)
        gather()
        assert set(os.listdir("/dev/shm")) - before == set()
        del tensor
        os.kill(os.getpid(), signal.SIGKILL)

    run_ranks(2, body, dies={0: signal.SIGKILL, 1: signal.SIGKILL})
    assert set(os.listdir("/dev/shm")) - before == set()
