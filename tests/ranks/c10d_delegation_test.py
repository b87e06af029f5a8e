"""Every c10d operation on CPU tensors of a tide group gives what a gloo group beside it gives."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch.distributed import ReduceOp

# torch 2.11 has monitored_barrier for groups named "gloo" alone, and its gloo has no all_to_all.
NEWER = torch.__version__ >= "2.14"

Group = Any
Operation = Callable[[Group, int, int, torch.dtype, bool], "list[torch.Tensor]"]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.int8,
]


def values(rank: int, numel: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Small whole numbers: every dtype sums them exactly, and no two ranks hold the same."""
    return ((torch.arange(numel) * 3 + rank * 5 + salt) % 7 + 1).to(dtype)


def finish(work: Any, asynchronous: bool) -> None:
    if asynchronous:
        assert work.wait()
    else:
        assert work is None


def broadcast(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    tensor = values(rank, 5, dtype)
    finish(dist.broadcast(tensor, src=1, group=group, async_op=asynchronous), asynchronous)
    return [tensor]


def all_reduce(op: Any) -> Operation:
    def run(
        group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
    ) -> list[torch.Tensor]:
        tensor = values(rank, 11, dtype)
        finish(dist.all_reduce(tensor, op, group=group, async_op=asynchronous), asynchronous)
        return [tensor]

    return run


def reduce(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    tensor = values(rank, 6, dtype)
    finish(dist.reduce(tensor, dst=1, group=group, async_op=asynchronous), asynchronous)
    return [tensor] if rank == 1 else []


def all_gather(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    outputs = [torch.zeros(4, dtype=dtype) for _ in range(size)]
    finish(
        dist.all_gather(outputs, values(rank, 4, dtype), group=group, async_op=asynchronous),
        asynchronous,
    )
    return outputs


def all_gather_single(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(size * 3, dtype=dtype)
    finish(
        dist.all_gather_into_tensor(
            output, values(rank, 3, dtype), group=group, async_op=asynchronous
        ),
        asynchronous,
    )
    return [output]


def gather(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    outputs = [torch.zeros(4, dtype=dtype) for _ in range(size)] if rank == 0 else None
    finish(
        dist.gather(values(rank, 4, dtype), outputs, dst=0, group=group, async_op=asynchronous),
        asynchronous,
    )
    return outputs or []


def scatter(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(4, dtype=dtype)
    inputs = [values(peer, 4, dtype) for peer in range(size)] if rank == 1 else None
    finish(dist.scatter(output, inputs, src=1, group=group, async_op=asynchronous), asynchronous)
    return [output]


def reduce_scatter(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(3, dtype=dtype)
    inputs = [values(rank, 3, dtype, salt=peer) for peer in range(size)]
    finish(dist.reduce_scatter(output, inputs, group=group, async_op=asynchronous), asynchronous)
    return [output]


def reduce_scatter_single(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(3, dtype=dtype)
    finish(
        dist.reduce_scatter_tensor(
            output, values(rank, 3 * size, dtype), group=group, async_op=asynchronous
        ),
        asynchronous,
    )
    return [output]


def all_to_all_single(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    # Rank r sends p + 1 elements to rank p.
    sent = [peer + 1 for peer in range(size)]
    received = [rank + 1] * size
    output = torch.zeros(sum(received), dtype=dtype)
    finish(
        dist.all_to_all_single(
            output,
            values(rank, sum(sent), dtype),
            received,
            sent,
            group=group,
            async_op=asynchronous,
        ),
        asynchronous,
    )
    return [output]


def all_to_all(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(size)]  # Gloo takes equal sizes only
    inputs = [values(rank, 3, dtype, salt=peer) for peer in range(size)]
    finish(dist.all_to_all(outputs, inputs, group=group, async_op=asynchronous), asynchronous)
    return outputs


def coalesced_all_reduce(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    tensors = [values(rank, numel, dtype) for numel in (1, 7, 30)]
    with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    if asynchronous:
        manager.wait()
    return tensors


def coalesced_all_gather(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    inputs = [values(rank, numel, dtype) for numel in (1, 7, 30)]
    outputs = [torch.zeros(tensor.numel() * size, dtype=dtype) for tensor in inputs]
    with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, tensor, group=group)
    if asynchronous:
        manager.wait()
    return outputs


def coalesced_reduce_scatter(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    inputs = [values(rank, numel * size, dtype) for numel in (1, 7, 30)]
    outputs = [torch.zeros(tensor.numel() // size, dtype=dtype) for tensor in inputs]
    with dist._coalescing_manager(group, async_ops=asynchronous) as manager:
        for output, tensor in zip(outputs, inputs, strict=True):
            dist.reduce_scatter_tensor(output, tensor, group=group)
    if asynchronous:
        manager.wait()
    return outputs


def ring(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(4, dtype=dtype)
    tensor = values(rank, 4, dtype)
    right, left = (rank + 1) % size, (rank - 1) % size
    if asynchronous:
        works = [dist.isend(tensor, right, group=group), dist.irecv(output, left, group=group)]
        for work in works:
            assert work is not None
            work.wait()
    elif rank % 2 == 0:
        dist.send(tensor, right, group=group)
        dist.recv(output, left, group=group)
    else:
        dist.recv(output, left, group=group)
        dist.send(tensor, right, group=group)
    return [output]


def batched_ring(
    group: Group, rank: int, size: int, dtype: torch.dtype, asynchronous: bool
) -> list[torch.Tensor]:
    output = torch.zeros(4, dtype=dtype)
    operations = [
        dist.P2POp(dist.isend, values(rank, 4, dtype), (rank + 1) % size, group),
        dist.P2POp(dist.irecv, output, (rank - 1) % size, group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return [output]


OPERATIONS: dict[str, Operation] = {
    "broadcast": broadcast,
    "all_reduce": all_reduce(ReduceOp.SUM),
    "all_reduce_min": all_reduce(ReduceOp.MIN),
    "all_reduce_max": all_reduce(ReduceOp.MAX),
    "all_reduce_product": all_reduce(ReduceOp.PRODUCT),
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_single": all_gather_single,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "reduce_scatter_single": reduce_scatter_single,
    "all_to_all_single": all_to_all_single,
    **({"all_to_all": all_to_all} if NEWER else {}),
    "coalesced_all_reduce": coalesced_all_reduce,
    "coalesced_all_gather": coalesced_all_gather,
    "coalesced_reduce_scatter": coalesced_reduce_scatter,
    "ring": ring,
    "batched_ring": batched_ring,
}


def same(operation: Operation, dtypes: list[torch.dtype]) -> Callable[[int, int], int]:
    """A body that runs the operation on both groups; returns how many tensors it compared."""

    def body(rank: int, size: int) -> int:
        gloo = dist.new_group(backend="gloo")
        compared = 0
        for dtype in dtypes:
            for asynchronous in (False, True):
                got = operation(dist.group.WORLD, rank, size, dtype, asynchronous)
                wanted = operation(gloo, rank, size, dtype, asynchronous)
                assert len(got) == len(wanted)
                for mine, theirs in zip(got, wanted, strict=True):
                    assert mine.dtype == theirs.dtype
                    assert torch.equal(mine, theirs), f"{dtype}: {mine} is not gloo's {theirs}"
                    compared += 1
        return compared

    return body


@pytest.mark.parametrize("name", OPERATIONS)
def test_gives_what_gloo_gives(name: str) -> None:
    assert sum(run_ranks(4, same(OPERATIONS[name], DTYPES))) > 0


def test_two_ranks() -> None:
    def body(rank: int, size: int) -> int:
        return sum(
            same(operation, [torch.float32])(rank, size) for operation in OPERATIONS.values()
        )

    assert sum(run_ranks(2, body)) > len(OPERATIONS)


@pytest.mark.parametrize("op", ["BAND", "BOR", "BXOR"])
def test_bitwise_operations(op: str) -> None:
    body = same(all_reduce(getattr(ReduceOp, op)), [torch.int32, torch.int64, torch.uint8])
    assert sum(run_ranks(2, body)) > 0


def averaged(rank: int, size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """AVG by every reducing operation; each result should be the mean over ranks."""
    results = {}
    tensor = values(rank, 8, dtype)
    dist.all_reduce(tensor, ReduceOp.AVG)
    results["all_reduce"] = tensor
    output = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter_tensor(output, values(rank, 4 * size, dtype), ReduceOp.AVG)
    results["reduce_scatter_single"] = output
    output = torch.zeros(4, dtype=dtype)
    dist.reduce_scatter(output, list(values(rank, 4 * size, dtype).chunk(size)), ReduceOp.AVG)
    results["reduce_scatter"] = output
    output = torch.zeros(4, dtype=dtype)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(output, values(rank, 4 * size, dtype), ReduceOp.AVG)
    results["reduce_scatter_coalesced"] = output
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 4])
def test_average_is_the_mean(size: int, dtype: torch.dtype) -> None:
    all_results = run_ranks(size, lambda rank, size: averaged(rank, size, dtype))
    whole = torch.stack([values(rank, 8, torch.float64) for rank in range(size)]).mean(0)
    scattered = (
        torch.stack([values(rank, 4 * size, torch.float64) for rank in range(size)])
        .mean(0)
        .chunk(size)
    )
    for rank, results in enumerate(all_results):
        for name, got in results.items():
            wanted = whole if name == "all_reduce" else scattered[rank]
            torch.testing.assert_close(
                got.double(), wanted, rtol=8e-3, atol=0, msg=f"{name} on rank {rank}"
            )


def premultiplied(rank: int, size: int, factor: float) -> dict[str, torch.Tensor]:
    """PREMUL_SUM by every reducing operation, on float32."""
    op = dist._make_nccl_premul_sum(factor)
    results = {}
    tensor = values(rank, 8, torch.float32)
    dist.all_reduce(tensor, op)
    results["all_reduce"] = tensor
    tensors = [values(rank, 8, torch.float32)]
    with dist._coalescing_manager():
        dist.all_reduce(tensors[0], op)
    results["all_reduce_coalesced"] = tensors[0]
    kept = values(rank, 8, torch.float32)
    dist.reduce(kept, dst=0, op=op)
    results["reduce"] = kept
    scattered = values(rank, 4 * size, torch.float32)
    untouched = scattered.clone()
    for name, run in {
        "reduce_scatter_single": lambda out: dist.reduce_scatter_tensor(out, scattered, op),
        "reduce_scatter": lambda out: dist.reduce_scatter(out, list(scattered.chunk(size)), op),
    }.items():
        output = torch.zeros(4)
        run(output)
        results[name] = output
    output = torch.zeros(4)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(output, scattered, op)
    results["reduce_scatter_coalesced"] = output
    assert torch.equal(scattered, untouched), "inputs of a reduce-scatter are read only"
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_premultiplied_sum(size: int) -> None:
    factor = 0.25
    all_results = run_ranks(size, lambda rank, size: premultiplied(rank, size, factor))
    whole = factor * torch.stack([values(rank, 8, torch.float32) for rank in range(size)]).sum(0)
    scattered = (
        factor * torch.stack([values(rank, 4 * size, torch.float32) for rank in range(size)]).sum(0)
    ).chunk(size)
    for rank, results in enumerate(all_results):
        for name, got in results.items():
            if name == "reduce":
                if rank == 0:
                    assert torch.equal(got, whole)
            elif name.startswith("all_reduce"):
                assert torch.equal(got, whole), name
            else:
                assert torch.equal(got, scattered[rank]), f"{name} on rank {rank}"


def test_object_collectives() -> None:
    def body(rank: int, size: int) -> None:
        gathered: list[Any] = [None] * size
        dist.all_gather_object(gathered, {"rank": rank})
        assert gathered == [{"rank": peer} for peer in range(size)]
        objects: list[Any] = ["from 1", 7] if rank == 1 else [None, None]
        dist.broadcast_object_list(objects, src=1)
        assert objects == ["from 1", 7]
        collected: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(rank * 10, collected, dst=0)
        assert rank != 0 or collected == [peer * 10 for peer in range(size)]
        scattered: list[Any] = [None]
        dist.scatter_object_list(
            scattered, [f"to {peer}" for peer in range(size)] if rank == 0 else None, src=0
        )
        assert scattered == [f"to {rank}"]

    run_ranks(4, body)


def test_barriers() -> None:
    def body(rank: int, size: int) -> None:
        dist.barrier()
        work = dist.barrier(async_op=True)
        assert work is not None
        work.wait()
        if NEWER:
            dist.monitored_barrier()

    run_ranks(4, body)


@pytest.mark.skipif(not NEWER, reason="this torch has monitored_barrier for gloo groups alone")
def test_monitored_barrier_names_the_missing_rank() -> None:
    def body(rank: int, size: int) -> str:
        if rank == 1:
            time.sleep(4.0)
            return ""
        try:
            dist.monitored_barrier(timeout=timedelta(seconds=2))
        except RuntimeError as error:
            return str(error)
        return "no error"

    results = run_ranks(2, body)
    assert "rank 1" in results[0].lower()


def test_receive_from_any() -> None:
    def body(rank: int, size: int) -> None:
        if rank == 0:
            seen = set()
            for _ in range(size - 1):
                tensor = torch.zeros(1)
                source = dist.recv(tensor)
                assert tensor.item() == source
                seen.add(source)
            assert seen == set(range(1, size))
        else:
            dist.send(torch.tensor([float(rank)]), 0)
        dist.barrier()

    run_ranks(4, body)


def test_region_for_a_device_waits_for_all_its_operations() -> None:
    def body(rank: int, size: int) -> None:
        tensors = [torch.full((3,), float(rank + 1)) for _ in range(4)]
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            for tensor in tensors:
                dist.group.WORLD.allreduce([tensor])
        manager.wait()
        for tensor in tensors:
            assert tensor.tolist() == [size * (size + 1) / 2] * 3

    run_ranks(4, body)


def test_functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    def body(rank: int, size: int) -> None:
        group = dist.group.WORLD
        mine = values(rank, 4, torch.float32)
        everyone = [values(peer, 4, torch.float32) for peer in range(size)]
        assert torch.equal(functional.all_reduce(mine, "sum", group), torch.stack(everyone).sum(0))
        assert torch.equal(functional.all_reduce(mine, "avg", group), torch.stack(everyone).mean(0))
        assert torch.equal(functional.all_gather_tensor(mine, 0, group), torch.cat(everyone))
        summed = torch.stack([values(peer, 4 * size, torch.float32) for peer in range(size)]).sum(0)
        reduced = functional.reduce_scatter_tensor(
            values(rank, 4 * size, torch.float32), "sum", 0, group
        )
        assert torch.equal(reduced, summed.chunk(size)[rank])
        gathered = functional.all_gather_into_tensor_coalesced([mine, mine[:2].clone()], group)
        assert torch.equal(gathered[0], torch.cat(everyone))
        assert torch.equal(gathered[1], torch.cat([tensor[:2] for tensor in everyone]))
        scattered = functional.reduce_scatter_tensor_coalesced(
            [values(rank, 4 * size, torch.float32), values(rank, size, torch.float32)],
            "sum",
            [0, 0],
            group,
        )
        assert torch.equal(scattered[0], summed.chunk(size)[rank])
        assert torch.equal(functional.broadcast(mine, 1, group), everyone[1])

    run_ranks(4, body)


def test_futures() -> None:
    def body(rank: int, size: int) -> None:
        tensor = torch.full((3,), float(rank + 1))
        work = dist.all_reduce(tensor, async_op=True)
        doubled = work.get_future().then(lambda future: future.value()[0] * 2)
        assert doubled.wait().tolist() == [size * (size + 1.0)] * 3
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
            dist.group.WORLD.allreduce([tensor])
            dist.group.WORLD.allreduce([tensor.clone()])
        (work,) = manager.works
        work.get_future().wait()
        work.wait()
        assert work.is_completed() and work.is_success()

    run_ranks(2, body)
