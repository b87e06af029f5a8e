"""Every c10d operation on CUDA tensors of a tide group gives what c10d's own backend gives: Gloo
with several ranks on one GPU, NCCL with one rank.

The test process itself never touches CUDA: its ranks are forked from it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from c10d_delegation_test import OPERATIONS, values
from harness import init_group, run_ranks
from torch.distributed import ReduceOp

pytestmark = pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists(), reason="no GPU on this machine (no /dev/nvidiactl)"
)
POINT_TO_POINT = {"ring", "batched_ring"}
COALESCED = {"coalesced_all_gather", "coalesced_reduce_scatter"}
"""Gloo alone ends the process on CUDA tensors in these and in point-to-point; what they give is
known without it."""
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
NCCL = {**SAFE, "TIDE_INNER_CUDA": "nccl"}
GLOO = {**SAFE, "TIDE_INNER_CUDA": "gloo"}
TIDE_BACKENDS = ["tide", "cpu:gloo,cuda:tide"]


def on_gpu() -> None:
    torch.cuda.set_device(0)
    torch.set_default_device("cuda")


def outcomes(names: list[str], group: Any, rank: int, size: int) -> dict[str, Any]:
    """Per operation, dtype and way of calling: the tensors it gave, or what it raised."""
    on_gpu()
    found: dict[str, Any] = {}
    for name in names:
        for dtype in DTYPES:
            for asynchronous in (False, True):
                key = f"{name} {dtype} {'async' if asynchronous else 'sync'}"
                print(key, flush=True)  # the last line is the operation that ended the process
                try:
                    tensors = OPERATIONS[name](group, rank, size, dtype, asynchronous)
                    assert all(tensor.is_cuda for tensor in tensors)
                    found[key] = [tensor.cpu() for tensor in tensors]
                except (RuntimeError, ValueError, AttributeError) as error:
                    found[key] = type(error).__name__
    return found


def collectives() -> list[str]:
    return [name for name in OPERATIONS if name not in POINT_TO_POINT | COALESCED]


def compare(got: dict[str, Any], wanted: dict[str, Any]) -> int:
    """How many tensors were equal. What the inner backend refuses, tide refuses alike."""
    assert got.keys() == wanted.keys()
    compared = 0
    for key, tensors in wanted.items():
        if isinstance(tensors, str):
            assert got[key] == tensors, key
            continue
        assert isinstance(got[key], list), f"{key}: tide raised {got[key]}"
        assert len(got[key]) == len(tensors), key
        for mine, theirs in zip(got[key], tensors, strict=True):
            assert mine.dtype == theirs.dtype and torch.equal(mine, theirs), key
            compared += 1
    return compared


@pytest.fixture(scope="module")
def from_gloo() -> list[dict[str, Any]]:
    def body(rank: int, size: int) -> dict[str, Any]:
        return outcomes(collectives(), dist.group.WORLD, rank, size)

    return run_ranks(4, body, backend="cpu:gloo,cuda:gloo", timeout=120, environment=SAFE)


@pytest.mark.parametrize("backend", TIDE_BACKENDS)
def test_several_ranks_give_what_gloo_gives(backend: str, from_gloo: list[dict[str, Any]]) -> None:
    def body(rank: int, size: int) -> dict[str, Any]:
        return outcomes(collectives(), dist.group.WORLD, rank, size)

    found = run_ranks(4, body, backend=backend, timeout=120, environment=GLOO)
    compared = [compare(got, wanted) for got, wanted in zip(found, from_gloo, strict=True)]
    assert min(compared) > 50


@pytest.mark.parametrize("backend", TIDE_BACKENDS)
def test_point_to_point_by_the_host(backend: str) -> None:
    def body(rank: int, size: int) -> int:
        on_gpu()
        compared = 0
        for name in sorted(POINT_TO_POINT):
            for dtype in DTYPES:
                for asynchronous in (False, True):
                    (got,) = OPERATIONS[name](None, rank, size, dtype, asynchronous)
                    assert torch.equal(got, values((rank - 1) % size, 4, dtype)), (name, dtype)
                    compared += 1
        strided = torch.zeros(6, 2)[:, 0]
        if rank == 0:
            dist.send(values(7, 6, torch.float32), 1)
        elif rank == 1:
            work = dist.irecv(strided, 0)
            work.wait()
            assert work.is_completed() and work.is_success()
            assert torch.equal(strided, values(7, 6, torch.float32))
        dist.barrier()
        return compared

    assert run_ranks(4, body, backend=backend, environment=GLOO) == [12] * 4


@pytest.mark.parametrize("backend", TIDE_BACKENDS)
def test_coalesced_collectives_of_several_ranks(backend: str) -> None:
    def body(rank: int, size: int) -> int:
        on_gpu()
        compared = 0
        for dtype in DTYPES:
            for asynchronous in (False, True):
                gathered = OPERATIONS["coalesced_all_gather"](None, rank, size, dtype, asynchronous)
                scattered = OPERATIONS["coalesced_reduce_scatter"](
                    None, rank, size, dtype, asynchronous
                )
                for numel, whole, part in zip((1, 7, 30), gathered, scattered, strict=True):
                    everyone = [values(peer, numel, dtype) for peer in range(size)]
                    assert torch.equal(whole, torch.cat(everyone)), (dtype, numel)
                    summed = sum(values(peer, numel * size, dtype) for peer in range(size))
                    assert torch.equal(part, summed.chunk(size)[rank]), (dtype, numel)
                    compared += 2
        return compared

    assert run_ranks(4, body, backend=backend, timeout=120, environment=GLOO) == [36] * 4


def test_receive_from_any_on_the_gpu() -> None:
    def body(rank: int, size: int) -> None:
        on_gpu()
        if rank == 0:
            sources = set()
            for _ in range(size - 1):
                tensor = torch.zeros(2)
                source = dist.recv(tensor)
                assert tensor.tolist() == [source, source + 0.5]
                sources.add(source)
            assert sources == {1, 2}
        else:
            dist.send(torch.tensor([rank, rank + 0.5]), 0)
        dist.barrier()

    run_ranks(3, body, environment=GLOO)


def test_send_waits_for_kernels_before_it() -> None:
    """What is sent is what the caller's stream will have written."""

    def body(rank: int, size: int) -> None:
        on_gpu()
        tensor = torch.zeros(1 << 20)
        if rank == 0:
            torch.cuda._sleep(200_000_000)  # about 0.1 s
            tensor += 3
            dist.send(tensor, 1)
        else:
            dist.recv(tensor, 0)
            assert tensor.min() == 3 and tensor.max() == 3

    run_ranks(2, body, environment=GLOO)


def test_objects_travel() -> None:
    def body(rank: int, size: int) -> None:
        on_gpu()
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": peer} for peer in range(size)]
        objects: list[Any] = ["from 1", 7] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects, src=1, device=torch.device("cuda"))
        assert objects == ["from 1", 7]
        if rank == 0:
            dist.send_object_list(["hello"], 1, device=torch.device("cuda"))
        elif rank == 1:
            received: list[Any] = [None]
            dist.recv_object_list(received, 0, device=torch.device("cuda"))
            assert received == ["hello"]

    run_ranks(3, body, environment=GLOO)


def alone(group: Any) -> dict[str, Callable[[bool], Any]]:
    """Operations that a group of one rank can do; each returns its tensors."""

    def done(work: Any, asynchronous: bool) -> None:
        if asynchronous:
            assert work.wait()

    def reduced(op: Any) -> Callable[[bool], Any]:
        def run(asynchronous: bool) -> Any:
            tensor = values(0, 9, torch.float32)
            done(dist.all_reduce(tensor, op, group=group, async_op=asynchronous), asynchronous)
            return [tensor]

        return run

    def broadcast(asynchronous: bool) -> Any:
        tensor = values(0, 9, torch.float32)
        done(dist.broadcast(tensor, 0, group=group, async_op=asynchronous), asynchronous)
        return [tensor]

    def scattered(op: Any) -> Callable[[bool], Any]:
        def run(asynchronous: bool) -> Any:
            output = torch.zeros(8)
            whole = values(0, 8, torch.float32)
            work = dist.reduce_scatter_tensor(output, whole, op, group=group, async_op=asynchronous)
            done(work, asynchronous)
            return [output, whole]

        return run

    def filled(operation: Any, numel: int) -> Callable[[bool], Any]:
        def run(asynchronous: bool) -> Any:
            output = torch.zeros(numel)
            whole = values(0, numel, torch.float32)
            done(operation(output, whole, group=group, async_op=asynchronous), asynchronous)
            return [output]

        return run

    def coalesced(asynchronous: bool) -> Any:
        outputs = [torch.zeros(numel) for numel in (1, 7, 30)]
        with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
            for output in outputs:
                inputs = values(0, output.numel(), torch.float32)
                dist.all_gather_into_tensor(output, inputs, group=group)
        if asynchronous:
            manager.wait()
        return outputs

    def coalesced_for_a_device(asynchronous: bool) -> Any:
        tensors = [values(0, numel, torch.float32) for numel in (1, 7, 30)]
        device = torch.device("cuda", 0)
        with dist._coalescing_manager(group, device, async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor, ReduceOp.MAX, group=group)
        manager.wait()
        return tensors

    def batched(asynchronous: bool) -> Any:
        output = torch.zeros(4)
        operations = [
            dist.P2POp(dist.isend, values(0, 4, torch.float32), 0, group),
            dist.P2POp(dist.irecv, output, 0, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return [output]

    return {
        "sum": reduced(ReduceOp.SUM),
        "average": reduced(ReduceOp.AVG),
        "premultiplied": reduced(dist._make_nccl_premul_sum(0.25)),
        "scattered sum": scattered(ReduceOp.SUM),
        "scattered average": scattered(ReduceOp.AVG),
        "scattered premultiplied": scattered(dist._make_nccl_premul_sum(0.25)),
        "broadcast": broadcast,
        "gathered": filled(dist.all_gather_into_tensor, 8),
        "coalesced": coalesced,
        "coalesced for a device": coalesced_for_a_device,
        "batched": batched,
        "all to all": filled(dist.all_to_all_single, 6),
    }


@pytest.mark.parametrize("backend", TIDE_BACKENDS)
def test_one_rank_gives_what_nccl_gives(backend: str) -> None:
    def body(rank: int, size: int) -> int:
        on_gpu()
        mine, theirs = alone(dist.group.WORLD), alone(dist.new_group(backend="nccl"))
        compared = 0
        for name in mine:
            for asynchronous in (False, True):
                print(name, asynchronous, flush=True)
                got, wanted = mine[name](asynchronous), theirs[name](asynchronous)
                for one, other in zip(got, wanted, strict=True):
                    assert torch.equal(one, other), name
                    compared += 1
        return compared

    (compared,) = run_ranks(1, body, backend=backend, timeout=120, environment=NCCL)
    assert compared > 30


def test_wait_orders_streams_and_does_not_block_the_host() -> None:
    """As a Work of NCCL: wait() makes the current stream wait, the host goes on."""

    def steps(group: Any, cycles: int) -> tuple[list[bool], float]:
        tensor = torch.zeros(1 << 20)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        tensor += 2
        work = dist.all_reduce(tensor, group=group, async_op=True)
        seen = [work.is_completed()]
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            work.wait()
            doubled = tensor * 2
            reached = torch.cuda.Event()
            reached.record()
        seen.append(reached.query())
        future = work.get_future().then(lambda done: done.value()[0] + 1)
        seen.append(future.done())
        side.synchronize()
        seen.append(work.is_completed())
        assert future.wait().max().item() == 3
        return seen, doubled.min().item()

    def body(rank: int, size: int) -> None:
        on_gpu()
        nccl = dist.new_group(backend="nccl")
        for group in (nccl, dist.group.WORLD):  # communicators are made here
            dist.all_reduce(torch.zeros(1), group=group)
            steps(group, 1_000)  # what is loaded at its first use
        # About two seconds, in which the host makes a few calls.
        wanted, got = steps(nccl, 4_000_000_000), steps(dist.group.WORLD, 4_000_000_000)
        assert got == wanted
        assert wanted[0][0] is False and wanted[0][1] is False and wanted[1] == 4

    run_ranks(1, body, environment=NCCL)


def test_tensors_outlive_their_names() -> None:
    def body(rank: int, size: int) -> None:
        on_gpu()
        for number in range(20):
            output = torch.zeros(1 << 20)
            source = torch.full((1 << 20,), float(number))
            torch.cuda._sleep(2_000_000)
            work = dist.all_gather_into_tensor(output, source, async_op=True)
            del source
            work.wait()
            del work
            torch.full((1 << 20,), -1.0)  # would take the memory of `source` if it were free
            assert output.min() == number and output.max() == number

    run_ranks(1, body, environment=NCCL)


def test_tide_and_nccl_in_flight_in_both_orders() -> None:
    def body(rank: int, size: int) -> None:
        on_gpu()
        nccl = dist.new_group(backend="nccl")
        mine, theirs = torch.ones(4096), torch.ones(4096)
        gathered = torch.zeros(4096)
        for number in range(1000):
            groups = [(dist.group.WORLD, mine), (nccl, theirs)]
            if number % 2:
                groups.reverse()
            works = [
                dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in groups
            ]
            works.append(dist.all_gather_into_tensor(gathered, theirs, async_op=True))
            for work in works if number % 4 < 2 else reversed(works):
                work.wait()
            mine += 1
            theirs += 1
        assert mine.min() == 1001 and theirs.max() == 1001 and gathered.max() == 1000

    run_ranks(1, body, timeout=120, environment=NCCL)


def test_group_bound_to_a_device() -> None:
    def body(rank: int, size: int) -> None:
        on_gpu()
        init_group("tide", device_id=torch.device("cuda", 0))
        tensor = torch.ones(5)
        dist.all_reduce(tensor)
        dist.barrier()
        dist.barrier(device_ids=[0])
        other = dist.new_group([0])
        dist.all_reduce(tensor, group=other)
        assert tensor.tolist() == [1.0] * 5
        inner = tide.inner(None, "cuda")
        assert type(inner).__name__ == "ProcessGroupNCCL"

    run_ranks(1, body, init=False, environment=NCCL)


def test_functional_collectives_on_the_gpu() -> None:
    import torch.distributed._functional_collectives as functional

    def body(rank: int, size: int) -> None:
        on_gpu()
        group = dist.group.WORLD
        mine = values(rank, 4, torch.float32)
        everyone = [values(peer, 4, torch.float32) for peer in range(size)]
        assert torch.equal(functional.all_reduce(mine, "sum", group), torch.stack(everyone).sum(0))
        assert torch.equal(functional.all_gather_tensor(mine, 0, group), torch.cat(everyone))
        summed = torch.stack([values(peer, 4 * size, torch.float32) for peer in range(size)]).sum(0)
        whole = values(rank, 4 * size, torch.float32)
        reduced = functional.reduce_scatter_tensor(whole, "sum", 0, group)
        assert torch.equal(reduced, summed.chunk(size)[rank])
        (gathered,) = functional.all_gather_into_tensor_coalesced([mine], group)
        assert torch.equal(gathered, torch.cat(everyone))

    run_ranks(4, body, environment=GLOO)


def test_found_by_its_entry_point() -> None:
    program = (
        "import torch, torch.distributed as d; d.init_process_group('tide'); "
        "x = torch.ones(3, device='cuda'); d.all_reduce(x); print(x.tolist()); "
        "d.destroy_process_group()"
    )
    environment = dict(os.environ, **NCCL, RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(probe.getsockname()[1])
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=90
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("[1.0, 1.0, 1.0]")
