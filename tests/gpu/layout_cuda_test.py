"""The coalesced all-gather and reduce-scatter of tide itself on CUDA tensors: several ranks on one
GPU, Gloo inside.

The test process itself never touches CUDA: its ranks are forked from it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list as gather
from harness import reduce_scatter_list as reduce
from harness import run_ranks
from torch.distributed import ReduceOp

pytestmark = pytest.mark.skipif(
    not Path("/dev/nvidiactl").exists(), reason="no GPU on this machine (no /dev/nvidiactl)"
)
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TIDE_INNER_CUDA": "gloo",
}
SIZES = [1, 0, 3, 64, 1000, 33, 4097, 17, 300_001]
HELD = 2_000_000_000  # clock cycles: about a second in which a stream does nothing else


def on_ranks(size: int, body: Callable[[int, int], Any], **keywords: Any) -> list[Any]:
    def started(rank: int, size: int) -> Any:
        torch.cuda.set_device(0)
        torch.set_default_device("cuda")
        return body(rank, size)

    return run_ranks(size, started, environment=ENVIRONMENT, timeout=120, **keywords)


def shard(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bits of a dtype, different for every rank and tensor."""
    generator = torch.Generator("cpu").manual_seed(1000 * rank + index)
    raw = torch.randint(
        0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8, device="cpu"
    )
    return raw.cuda().view(dtype)


def numbers(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(77 * rank + index)
    values = torch.randn(numel, generator=generator, device="cpu") * 2.0 ** (rank % 5)
    return values.cuda().to(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_gathers_into_own_memory_move_bytes(size: int) -> None:
    def body(rank: int, size: int) -> None:
        for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.bool):
            outputs = [tide.empty(n * size, dtype=dtype, device="cuda") for n in SIZES]
            for turn in range(3):
                kind = torch.uint8 if dtype == torch.bool else dtype
                inputs = [shard(rank + turn, i, n, kind) for i, n in enumerate(SIZES)]
                inputs = [x.view(torch.bool) if dtype == torch.bool else x for x in inputs]
                gather(outputs, inputs).wait()
                for i, output in enumerate(outputs):
                    wanted = torch.cat([shard(r + turn, i, SIZES[i], kind) for r in range(size)])
                    assert same_bytes(output, wanted), f"{dtype}, tensor {i}, turn {turn}"
        assert tide.of(device="cuda").why_delegated() == {}

    on_ranks(size, body)


def test_registered_lists_and_columns() -> None:
    def body(rank: int, size: int) -> None:
        whole = torch.arange(12 * 8, dtype=torch.float32).view(12, 8)
        layout = tide.GroupLayout.of([(12, 8), (12, 8)], [1, 0])
        outputs = [torch.full((12, 8), -1.0), torch.full((12, 8), -1.0)]
        alias = outputs[0][3]
        tide.register(outputs)
        columns = whole.chunk(size, 1)[rank].contiguous()
        rows = whole.chunk(size, 0)[rank].contiguous()
        layout.all_gather(outputs, [columns, rows])
        assert torch.equal(outputs[0], whole) and torch.equal(outputs[1], whole)
        assert torch.equal(alias, whole[3])
        flat = torch.empty(2 * 96 // size)
        layout.reduce_scatter(flat, [whole * (rank + 1), whole], scale=0.5)
        total = sum(range(1, size + 1))
        assert torch.equal(flat[: 96 // size], columns.flatten() * total / 2)
        assert torch.equal(flat[96 // size :], rows.flatten() * size / 2)

    on_ranks(4, body)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_reductions_are_fp32_sums_in_rank_order(size: int) -> None:
    def body(rank: int, size: int) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for op, scale in ((ReduceOp.SUM, 1.0), (ReduceOp.AVG, 1.0 / size)):
                inputs = [numbers(rank, i, n * size, dtype) for i, n in enumerate(SIZES)]
                outputs = [torch.empty(n, dtype=dtype) for n in SIZES]
                reduce(outputs, inputs, op).wait()
                for i, n in enumerate(SIZES):
                    total = torch.zeros(n * size, dtype=torch.float32)
                    for peer in range(size):
                        total = total + numbers(peer, i, n * size, dtype).float()
                    wanted = (total * scale).to(dtype)[rank * n : (rank + 1) * n]
                    assert torch.equal(outputs[i], wanted), f"{dtype} {op}, tensor {i}"
        assert tide.of(device="cuda").why_delegated() == {}

    on_ranks(size, body)


def test_other_lists_go_to_the_inner_backend_with_a_reason() -> None:
    def body(rank: int, size: int) -> None:
        outputs = [torch.empty(4 * size)]
        gather(outputs, [torch.full((4,), float(rank))]).wait()
        assert outputs[0].tolist() == [float(r) for r in range(size) for _ in range(4)]
        (reason,) = tide.of(device="cuda").why_delegated().values()
        assert "tide.empty" in reason
        summed = [torch.empty(4, dtype=torch.int64)]
        reduce(summed, [torch.arange(4 * size)]).wait()
        assert summed[0].tolist() == [size * (4 * rank + i) for i in range(4)]
        assert len(tide.of(device="cuda").why_delegated()) == 2

    on_ranks(2, body)


def test_operations_keep_the_order_of_streams() -> None:
    """Inputs are written and outputs read by kernels around the call; nothing waits on the host."""

    def body(rank: int, size: int) -> None:
        output = tide.empty(1000 * size, device="cuda")
        shares = torch.empty(1000)
        seen, summed = [], []
        side = torch.cuda.Stream()
        for turn in range(100):
            stream = side if turn % 3 == 0 else torch.cuda.current_stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                if turn % 10 == 0:
                    torch.cuda._sleep(20_000_000 * (rank + 1))
                value = torch.full((1000,), float(10 * turn + rank))
                work = gather([output], [value])
                work.wait()
                value.fill_(-1)  # behind the pushes
                seen.append(output.clone())
                whole = torch.full((1000 * size,), float(turn + rank))
                work = reduce([shares], [whole])
                work.wait()
                whole.fill_(1e9)
                summed.append(shares.clone())
            torch.cuda.current_stream().wait_stream(stream)
        for turn in range(100):
            wanted = torch.tensor([10.0 * turn + r for r in range(size)]).repeat_interleave(1000)
            assert torch.equal(seen[turn], wanted), turn
            assert torch.equal(
                summed[turn], torch.full((1000,), float(size * turn + sum(range(size))))
            )

    on_ranks(4, body)


def test_works_and_futures_order_streams_and_not_the_host() -> None:
    def body(rank: int, size: int) -> None:
        output = tide.empty(8 * size, device="cuda")
        value = torch.zeros(8)
        # Once before: a kernel's first launch loads it, and a pool's first stream makes all of
        # them, which waits for what runs.
        value.fill_(rank)
        warm = gather([output], [value * 2])
        warm.wait()
        warm.get_future().wait()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(HELD)
        value.fill_(rank)
        work = gather([output], [value])
        assert work.wait() and not work.is_completed()  # the stream is still held
        future = work.get_future()
        (gathered,) = future.wait()
        doubled = gathered * 2
        assert not work.is_completed()
        assert doubled.tolist() == [2.0 * r for r in range(size) for _ in range(8)]
        torch.cuda.synchronize()
        while not work.is_completed():
            pass
        assert work.is_success()

    on_ranks(2, body)


def test_a_recording_stream_is_refused() -> None:
    def body(rank: int, size: int) -> None:
        output = tide.empty(8 * size, device="cuda")
        value = torch.full((8,), float(rank))
        gather([output], [value]).wait()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="graph"), torch.cuda.graph(graph):
            gather([output], [value])
        gather([output], [value]).wait()
        assert output.tolist() == [float(r) for r in range(size) for _ in range(8)]

    on_ranks(2, body)


def ends_badly(body: Callable[[int, int], Any]) -> Callable[[int, int], Any]:
    def run(rank: int, size: int) -> Any:
        result = body(rank, size)
        dist.distributed_c10d._abort_process_group()
        return result

    return run


@pytest.mark.parametrize("death", [signal.SIGKILL, None])
def test_a_lost_rank_ends_the_others_and_frees_their_streams(death: Any) -> None:
    """Killed, or leaving a call out: survivors' streams run on, their next calls raise."""

    def body(rank: int, size: int) -> None:
        output = tide.empty(1000 * size, device="cuda")
        value = torch.ones(1000)
        gather([output], [value]).wait()
        torch.cuda.synchronize()
        if rank == 1:
            if death is not None:
                os.kill(os.getpid(), death)
            time.sleep(14)
        else:
            work = gather([output], [value])
            torch.cuda.synchronize()  # released by poison
            with pytest.raises(dist.DistBackendError, match="rank 1"):
                work.wait()
            with pytest.raises(dist.DistBackendError, match="rank 1"):
                gather([output], [value])
            # Memory that was allocated before is as usable as ever.
            assert float((value + 1).sum()) == 2000.0

    on_ranks(
        3,
        ends_badly(body),
        group_timeout=600 if death is not None else 6,
        dies={} if death is None else {1: death},
    )
