"""The coalesced all-gather and reduce-scatter of tide itself, on CPU tensors."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy
import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list as gather
from harness import reduce_scatter_list as reduce
from harness import run_ranks
from torch.distributed import ReduceOp

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
SUMMED_INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OTHERS = [
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.complex32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
SIZES = [1, 0, 3, 64, 1000, 33, 4097, 17]


def some_bytes(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit patterns of a dtype, different for every rank and tensor; two-valued for bool."""
    generator = torch.Generator().manual_seed(1000 * rank + index)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    raw = torch.randint(0, 256, (numel * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_moves_bytes_of_every_dtype(size: int) -> None:
    def body(rank: int, size: int) -> None:
        for dtype in FLOATS + INTEGERS + OTHERS:
            inputs = [some_bytes(rank, index, numel, dtype) for index, numel in enumerate(SIZES)]
            outputs = [torch.zeros(numel * size, dtype=dtype) for numel in SIZES]
            gather(outputs, inputs).wait()
            for index, output in enumerate(outputs):
                wanted = torch.cat(
                    [some_bytes(peer, index, SIZES[index], dtype) for peer in range(size)]
                )
                assert same_bytes(output, wanted), f"{dtype}, tensor {index}"
        assert tide.of().why_delegated() == {}
        assert tide.of().counters()["operations"] > 0

    run_ranks(size, body)


def test_one_list_of_many_dtypes() -> None:
    def body(rank: int, size: int) -> None:
        dtypes = FLOATS + INTEGERS
        inputs = [some_bytes(rank, index, 5 + index, dtype) for index, dtype in enumerate(dtypes)]
        outputs = [torch.zeros(tensor.numel() * size, dtype=tensor.dtype) for tensor in inputs]
        gather(outputs, inputs).wait()
        for index, (dtype, output) in enumerate(zip(dtypes, outputs, strict=True)):
            wanted = torch.cat([some_bytes(peer, index, 5 + index, dtype) for peer in range(size)])
            assert same_bytes(output, wanted)
        whole = [
            torch.full((3 * size,), rank + 1).to(dtype)
            for dtype in (torch.float32, torch.int64, torch.float32)
        ]
        shards = [torch.zeros(3, dtype=tensor.dtype) for tensor in whole]
        reduce(shards, whole).wait()
        for shard in shards:
            assert shard.tolist() == [size * (size + 1) / 2] * 3
        assert tide.of().why_delegated() == {}

    run_ranks(3, body)


def values(rank: int, index: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(77 * rank + index)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    low, high = max(info.min, -100) // 8, min(info.max, 100) // 8
    return torch.randint(low, high, (numel,), generator=generator).to(dtype)


def reference(
    ranks: int, index: int, numel: int, dtype: torch.dtype, op: str, scale: float
) -> torch.Tensor:
    """In rank order, in fp32 (fp64 as such, integers exactly), then scaled, rounded once."""
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16, torch.float32) else dtype
    parts = [values(rank, index, numel, dtype).to(wide) for rank in range(ranks)]
    total = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            total = (
                (total.to(torch.int64) + part.to(torch.int64)).to(wide)
                if not wide.is_floating_point
                else total + part
            )
        else:
            chosen = torch.minimum if op == "min" else torch.maximum
            if wide.is_floating_point:
                total = chosen(total, part)
            else:
                total = chosen(total.to(torch.int64), part.to(torch.int64)).to(wide)
    if scale != 1.0:
        total = total * torch.tensor(scale, dtype=wide)
    return total.to(dtype)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["sum", "avg", "premultiplied", "min", "max"])
def test_reductions_equal_the_reference_bit_for_bit(name: str, size: int) -> None:
    dtypes = FLOATS if name in ("avg", "premultiplied") else FLOATS + SUMMED_INTEGERS

    def body(rank: int, size: int) -> None:
        op: Any = {
            "sum": ReduceOp.SUM,
            "avg": ReduceOp.AVG,
            "min": ReduceOp.MIN,
            "max": ReduceOp.MAX,
            "premultiplied": dist._make_nccl_premul_sum(0.375),
        }[name]
        scale = {"avg": 1.0 / size, "premultiplied": 0.375}.get(name, 1.0)
        kind = name if name in ("min", "max") else "sum"
        for dtype in dtypes:
            inputs = [values(rank, index, numel * size, dtype) for index, numel in enumerate(SIZES)]
            outputs = [torch.zeros(numel, dtype=dtype) for numel in SIZES]
            kept = [tensor.clone() for tensor in inputs]
            reduce(outputs, inputs, op).wait()
            for index, numel in enumerate(SIZES):
                wanted = reference(size, index, numel * size, dtype, kind, scale)[
                    rank * numel : (rank + 1) * numel
                ]
                assert same_bytes(outputs[index], wanted), (
                    f"{dtype}, tensor {index}: {outputs[index]} {wanted}"
                )
                assert same_bytes(inputs[index], kept[index]), "inputs are read only"
        assert tide.of().why_delegated() == {}

    run_ranks(size, body)


@pytest.mark.parametrize(
    ("op", "dtype", "reason"),
    [
        (ReduceOp.PRODUCT, torch.float32, "SUM, AVG, PREMUL_SUM, MIN and MAX only"),
        (ReduceOp.BOR, torch.int32, "SUM, AVG, PREMUL_SUM, MIN and MAX only"),
    ],
)
def test_other_operations_are_delegated_with_a_reason(
    op: Any, dtype: torch.dtype, reason: str
) -> None:
    def body(rank: int, size: int) -> None:
        gloo = dist.new_group(backend="gloo")
        results = []
        for group in (dist.group.WORLD, gloo):
            outputs = [torch.zeros(3, dtype=dtype)]
            reduce(outputs, [torch.arange(1, 3 * size + 1).to(dtype) + rank], op, group).wait()
            results.append(outputs[0])
        assert torch.equal(*results)
        assert reason in tide.of().why_delegated()["reduce_scatter_tensor_coalesced"]
        assert tide.of().counters()["operations"] == 0

    run_ranks(2, body)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16])
def test_dtypes_that_are_not_summed_are_never_summed_by_tide(dtype: torch.dtype) -> None:
    def body(rank: int, size: int) -> None:
        with pytest.raises(RuntimeError, match=r"[Ss]calar type|[Uu]nsupported"):  # what Gloo says
            reduce([torch.zeros(3).to(dtype)], [torch.zeros(3 * size).to(dtype)]).wait()
        assert "does not sum dtype" in tide.of().why_delegated()["reduce_scatter_tensor_coalesced"]

    run_ranks(2, body)


def test_own_collectives_can_be_switched_off() -> None:
    def body(rank: int, size: int) -> None:
        outputs = [torch.zeros(2 * size)]
        gather(outputs, [torch.full((2,), float(rank))]).wait()
        assert outputs[0].tolist() == [float(peer) for peer in range(size) for _ in range(2)]
        assert tide.of().why_delegated() == {
            "all_gather_into_tensor_coalesced": "TIDE_COLLECTIVES=0"
        }

    run_ranks(2, body, environment={"TIDE_COLLECTIVES": "0"})


def test_ranks_on_unequal_nodes_are_delegated_by_vote() -> None:
    def body(rank: int, size: int) -> str:
        outputs = [torch.zeros(2 * size)]
        gather(outputs, [torch.full((2,), float(rank))]).wait()
        assert outputs[0].tolist() == [float(peer) for peer in range(size) for _ in range(2)]
        shards = [torch.zeros(2)]
        reduce(shards, [torch.ones(2 * size)]).wait()
        assert shards[0].tolist() == [float(size)] * 2
        return tide.of().why_delegated()["all_gather_into_tensor_coalesced"]

    reasons = run_ranks(4, body, options=lambda: tide.Options(node_size=3))
    assert len(set(reasons)) == 1 and "node" in reasons[0]


def test_a_thousand_tensors() -> None:
    def body(rank: int, size: int) -> None:
        sizes = [(index * 7) % 50 for index in range(1000)]
        inputs = [
            torch.full((numel,), float(rank * 1000 + index)) for index, numel in enumerate(sizes)
        ]
        outputs = [torch.zeros(numel * size) for numel in sizes]
        for _ in range(3):
            gather(outputs, inputs).wait()
        for index, (numel, output) in enumerate(zip(sizes, outputs, strict=True)):
            wanted = torch.tensor(
                [peer * 1000.0 + index for peer in range(size)]
            ).repeat_interleave(numel)
            assert torch.equal(output, wanted)
        shards = [torch.zeros(numel) for numel in sizes]
        reduce(shards, outputs, ReduceOp.SUM).wait()
        for index, (numel, shard) in enumerate(zip(sizes, shards, strict=True)):
            assert torch.equal(shard, torch.full((numel,), size * (rank * 1000.0 + index)))

    run_ranks(4, body, timeout=120)


def test_more_than_two_gibibytes() -> None:
    # 1.25 GiB a rank in two tensors: 2.5 GiB gathered, and offsets beyond 2^31 bytes in one tensor.
    numel = [1_200_000_000, 50_000_001]

    def body(rank: int, size: int) -> None:
        inputs = [torch.full((count,), rank + 1, dtype=torch.uint8) for count in numel]
        outputs = [torch.empty(count * size, dtype=torch.uint8) for count in numel]
        gather(outputs, inputs).wait()
        for count, output in zip(numel, outputs, strict=True):
            for peer in range(size):
                part = output[peer * count : (peer + 1) * count]
                assert int(part.min()) == int(part.max()) == peer + 1
        del inputs
        shards = [torch.empty(count, dtype=torch.uint8) for count in numel]
        reduce(shards, outputs).wait()
        for shard in shards:
            assert int(shard.min()) == int(shard.max()) == size * (rank + 1)

    run_ranks(2, body, timeout=240, group_timeout=120)


def test_tensors_from_empty_are_written_straight() -> None:
    def body(rank: int, size: int) -> tuple[dict[str, int], dict[str, int]]:
        numel = 100_000
        inputs = [torch.full((numel,), rank + 1.0) for _ in range(3)]
        backend = tide.of()
        counts = []
        for make in (torch.empty, tide.empty):
            outputs = [make(numel * size) for _ in range(3)]
            gather(outputs, inputs).wait()  # areas are made with the first call
            before = backend.counters()
            gather(outputs, inputs).wait()
            after = backend.counters()
            counts.append({key: after[key] - before[key] for key in before})
            for output in outputs:
                wanted = torch.arange(1.0, size + 1).repeat_interleave(numel)
                assert torch.equal(output, wanted)
        return counts[0], counts[1]

    for bounced, straight in run_ranks(4, body):
        moved = 3 * 100_000 * 4
        # A rank pushes its shards to the other three on either path; a bounce copies on arrival.
        assert bounced["bytes_pushed"] == straight["bytes_pushed"] == 3 * moved
        assert straight["bytes_copied"] == moved
        assert bounced["bytes_copied"] == moved + 3 * moved
        assert straight["arena_bytes"] == 0


def test_empty_takes_sizes_as_torch_does() -> None:
    def body(rank: int, size: int) -> None:
        for sizes in [(2, 3), ((2, 3),), ([2, 3],), (torch.Size([2, 3]),), (torch.tensor(2), 3)]:
            made = tide.empty(*sizes)
            assert made.shape == (2, 3) and made.dtype == torch.float32 and not made.any()
        assert tide.empty().shape == tide.empty(()).shape == torch.Size([])
        assert tide.empty(4, 0, 2**61).shape == (4, 0, 2**61)
        for wrong in [(2.5,), ("2",), ((2, 3), 4), ((2, 2.0),)]:
            with pytest.raises(TypeError, match="sizes must be numbers"):
                tide.empty(*wrong)
        for large in [(2**62,), (2**32, 2**32), (2**20,) * 4, (2**54,)]:
            with pytest.raises(RuntimeError, match="more bytes than a process can address"):
                tide.empty(*large, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="must not be negative, got -1"):
            tide.empty(-1, 0)
        assert tide.empty(3).shape == (3,)

    run_ranks(2, body)


def test_registered_lists_are_written_straight() -> None:
    def body(rank: int, size: int) -> dict[str, int]:
        inputs = [torch.full((1000,), rank + 1.0), torch.full((77,), rank + 1, dtype=torch.int64)]
        outputs = [torch.full((1000 * size,), 5.0), torch.zeros(77 * size, dtype=torch.int64)]
        alias = outputs[0].view(size, 1000)
        tide.register(outputs, inputs)
        assert alias[0, 0] == 5.0, "registering keeps what the tensor holds"
        assert alias.data_ptr() == outputs[0].data_ptr(), "views move along"
        gather(outputs, inputs).wait()
        before = tide.of().counters()
        gather(outputs, inputs).wait()
        after = tide.of().counters()
        assert torch.equal(alias[:, 0], torch.arange(1.0, size + 1))
        assert torch.equal(outputs[1], torch.arange(1, size + 1).repeat_interleave(77))
        with pytest.raises(RuntimeError, match="not torch's own"):
            tide.register([torch.from_numpy(numpy.zeros(4, dtype=numpy.float32))])
        return {key: after[key] - before[key] for key in before}

    for counts in run_ranks(2, body):
        assert counts["bytes_copied"] == 1000 * 4 + 77 * 8


def test_tensors_from_empty_outlive_the_group() -> None:
    def body(rank: int, size: int) -> None:
        tensor = tide.empty(1000, dtype=torch.int32)
        assert tensor.dtype == torch.int32 and int(tensor.abs().sum()) == 0
        with pytest.raises(ValueError, match="not served by tide"):
            tide.empty(3, device="meta")
        dist.destroy_process_group()
        tensor += rank + 1
        assert int(tensor.sum()) == 1000 * (rank + 1)

    run_ranks(2, body)


def test_input_at_its_own_place() -> None:
    def body(rank: int, size: int) -> None:
        outputs = [torch.zeros(5 * size), torch.zeros(300 * size)]
        inputs = [output.view(size, -1)[rank] for output in outputs]
        for tensor in inputs:
            tensor.fill_(rank + 1.0)
        gather(outputs, inputs).wait()
        for output in outputs:
            assert torch.equal(output.view(size, -1)[:, 0], torch.arange(1.0, size + 1))
        whole = [torch.full((7 * size,), rank + 1.0)]
        reduce([whole[0].view(size, -1)[rank]], whole).wait()
        assert whole[0].view(size, -1)[rank].tolist() == [size * (size + 1) / 2] * 7

    run_ranks(3, body)


def test_columns() -> None:
    def body(rank: int, size: int) -> None:
        shapes, dims = [(4, 6 * size), (5 * size,), (2, 3, size)], [1, 0, 2]
        layout = tide.GroupLayout.of(shapes, dims)
        assert layout.rows == (4, 1, 6)
        whole = [torch.arange(float(torch.Size(shape).numel())).reshape(shape) for shape in shapes]
        shards = [t.chunk(size, dim)[rank].contiguous() for t, dim in zip(whole, dims, strict=True)]
        outputs = [torch.zeros_like(tensor) for tensor in whole]
        assert layout.all_gather(outputs, shards) is None
        for output, tensor in zip(outputs, whole, strict=True):
            assert torch.equal(output, tensor)
        gradients = [(tensor * (rank + 1)).to(torch.bfloat16) for tensor in whole]
        flat = torch.zeros(sum(shard.numel() for shard in shards))
        work = layout.reduce_scatter(flat, gradients, scale=0.5, async_op=True)
        work.wait()
        total = [
            sum((tensor * (peer + 1)).to(torch.bfloat16).float() for peer in range(size)) * 0.5
            for tensor in whole
        ]
        wanted = torch.cat(
            [t.chunk(size, dim)[rank].flatten() for t, dim in zip(total, dims, strict=True)]
        )
        assert torch.equal(flat, wanted)

    run_ranks(2, body)
    run_ranks(4, body)


def test_layouts_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"dimension 2 is not one of a tensor of shape \(4, 6\)"):
        tide.GroupLayout.of([(4, 6)], [2])


WRONG = {
    "counts": (
        lambda size: ([torch.zeros(2 * size)], [torch.zeros(2), torch.zeros(2)]),
        "one output per input, got 1 outputs and 2 inputs",
    ),
    "sizes": (
        lambda size: (
            [torch.zeros(2 * size), torch.zeros(3 * size + 1)],
            [torch.zeros(2), torch.zeros(3)],
        ),
        "output 1 wanted with 6 elements .2 ranks x 3 of input 1., got 7",
    ),
    "dtypes": (
        lambda size: ([torch.zeros(2 * size, dtype=torch.float64)], [torch.zeros(2)]),
        "output 0 wanted of its input's dtype Float, got Double",
    ),
    "overlap": (
        lambda size: (
            lambda base: ([base[: 2 * size], base[size : 3 * size]], [torch.zeros(2)] * 2)
        )(torch.zeros(9 * size)),
        "output 1 wanted apart from output 0",
    ),
    "input in output": (
        lambda size: (lambda base: ([base], [base[1:3]]))(torch.zeros(2 * size)),
        "wanted apart from",
    ),
    "strided output": (
        lambda size: ([torch.zeros(size, 4)[:, :2]], [torch.zeros(2)]),
        "output 0 wanted contiguous",
    ),
    "strided input": (
        lambda size: ([torch.zeros(2 * size)], [torch.zeros(4)[::2]]),
        "input 0 wanted contiguous",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_gathers_name_the_tensor(case: str) -> None:
    make, message = WRONG[case]

    def body(rank: int, size: int) -> None:
        with pytest.raises(
            RuntimeError, match=f"all-gather of group '0', rank {rank}: .*{message}"
        ):
            gather(*make(size))
        # Nothing was sent: the group goes on.
        outputs = [torch.zeros(2 * size)]
        gather(outputs, [torch.full((2,), float(rank))]).wait()
        assert outputs[0].tolist() == [float(peer) for peer in range(size) for _ in range(2)]

    run_ranks(2, body)


def test_tensors_of_another_device_are_named() -> None:
    def body(rank: int, size: int) -> None:
        layout = tide.GroupLayout.of([(2 * size,)], [0])
        with pytest.raises(
            RuntimeError, match="output 0 wanted on cpu like the others, got on meta"
        ):
            layout.all_gather([torch.zeros(2 * size, device="meta")], [torch.zeros(2)])
        with pytest.raises(RuntimeError, match="the flat output wanted on cpu"):
            layout.reduce_scatter(torch.zeros(2, device="meta"), [torch.zeros(2 * size)])
        with pytest.raises(RuntimeError, match="the flat output wanted with 2 elements, got 3"):
            layout.reduce_scatter(torch.zeros(3), [torch.zeros(2 * size)])

    run_ranks(2, body)


def test_wrong_reductions_name_the_tensor() -> None:
    def body(rank: int, size: int) -> None:
        for outputs, inputs, message in [
            ([torch.zeros(2)], [torch.zeros(2 * size + 1)], "input 0 wanted with 4 elements"),
            ([torch.zeros(2, dtype=torch.int32)], [torch.zeros(2 * size)], "dtype Float, got Int"),
            ([torch.zeros(4)[::2]], [torch.zeros(2 * size)], "output 0 wanted contiguous"),
            (
                [torch.zeros(2)] * 2,
                [torch.zeros(2 * size)] * 2,
                "one output per input|wanted apart from",
            ),
        ]:
            with pytest.raises(
                RuntimeError, match=f"reduce-scatter of group '0', rank {rank}: .*({message})"
            ):
                reduce(outputs, inputs)

    run_ranks(2, body)


def test_ranks_that_disagree_all_get_an_error() -> None:
    def sizes(rank: int, size: int) -> None:
        numel = 3 if rank == 1 else 2
        gather(
            [torch.zeros(2 * size), torch.zeros(numel * size)], [torch.zeros(2), torch.zeros(numel)]
        ).wait()

    def dtypes(rank: int, size: int) -> None:
        dtype = torch.int32 if rank == 1 else torch.float32
        gather([torch.zeros(2 * size, dtype=dtype)], [torch.zeros(2, dtype=dtype)]).wait()

    def kinds(rank: int, size: int) -> None:
        if rank == 1:
            reduce([torch.zeros(2)], [torch.zeros(2 * size)]).wait()
        else:
            gather([torch.zeros(2 * size)], [torch.zeros(2)]).wait()

    def operations(rank: int, size: int) -> None:
        reduce(
            [torch.zeros(2)], [torch.zeros(2 * size)], ReduceOp.MIN if rank == 1 else ReduceOp.MAX
        ).wait()

    for wrong in (sizes, dtypes, kinds, operations):

        def body(rank: int, size: int, wrong: Any = wrong) -> str:
            with pytest.raises(dist.DistBackendError, match="group '0'") as caught:
                wrong(rank, size)
            # Broken for tide's own, on all ranks; what is delegated goes on.
            with pytest.raises(dist.DistBackendError):
                gather([torch.zeros(2 * size)], [torch.zeros(2)]).wait()
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            assert tensor.item() == size
            # A new group in the same process works.
            fresh = dist.new_group(backend="tide")
            outputs = [torch.zeros(size)]
            gather(outputs, [torch.full((1,), float(rank))], fresh).wait()
            assert outputs[0].tolist() == [float(peer) for peer in range(size)]
            return str(caught.value)

        messages = run_ranks(3, body)
        assert any("rank 1" in message for message in messages), messages


def test_works_and_futures() -> None:
    def body(rank: int, size: int) -> None:
        outputs = [torch.zeros(50_000 * size) for _ in range(4)]
        inputs = [torch.full((50_000,), rank + 1.0) for _ in range(4)]
        work = gather(outputs, inputs)
        doubled = work.get_future().then(lambda future: [tensor * 2 for tensor in future.value()])
        for tensor in doubled.wait():
            assert torch.equal(tensor.view(size, -1)[:, 0], 2 * torch.arange(1.0, size + 1))
        work.wait()
        assert work.is_completed() and work.is_success()
        assert [tensor.data_ptr() for tensor in work.result()] == [
            tensor.data_ptr() for tensor in outputs
        ]
        again = gather(outputs, inputs)
        again.synchronize()
        # A work that is dropped at once still keeps its tensors alive.
        for _ in range(20):
            gather([torch.zeros(1000 * size)], [torch.ones(1000)])
        dist.barrier()
        with dist._coalescing_manager(async_ops=True) as manager:
            for output, tensor in zip(outputs, inputs, strict=True):
                dist.all_gather_into_tensor(output, tensor)
        manager.wait()

    run_ranks(2, body)


def test_tensors_are_let_go_on_the_callers_thread() -> None:
    # The engine's threads must never take the GIL: once Python ends, that would end the process.
    class Marker:
        def __init__(self, threads: list[int]) -> None:
            self.threads = threads

        def __del__(self) -> None:
            self.threads.append(threading.get_ident())

    def body(rank: int, size: int) -> None:
        threads: list[int] = []
        for step in range(20):
            output, tensor = torch.zeros(1000 * size), torch.ones(1000)
            output.marker, tensor.marker = Marker(threads), Marker(threads)  # type: ignore[attr-defined]
            work = gather([output], [tensor])
            if step % 2:
                work.get_future()
            del work, output, tensor
        dist.barrier()
        for _ in range(2):
            gather([torch.zeros(size)], [torch.ones(1)]).wait()
        assert len(threads) == 40
        assert set(threads) == {threading.get_ident()}

    run_ranks(2, body)


def test_many_operations_in_flight() -> None:
    def body(rank: int, size: int) -> None:
        generator = random.Random(3)
        pending = []
        for step in range(60):
            numel = generator.randrange(0, 5000)
            inputs = [torch.full((numel,), float(rank + step))]
            if generator.random() < 0.5:
                outputs = [torch.zeros(numel * size)]
                pending.append(
                    (gather(outputs, inputs), outputs[0], inputs[0], "gather", step, numel)
                )
            else:
                whole = [torch.full((numel * size,), float(rank + step))]
                outputs = [torch.zeros(numel)]
                pending.append(
                    (reduce(outputs, whole), outputs[0], whole[0], "reduce", step, numel)
                )
        generator.shuffle(pending)
        for work, output, _, kind, step, numel in pending:
            work.wait()
            if kind == "gather":
                wanted = torch.tensor(
                    [float(peer + step) for peer in range(size)]
                ).repeat_interleave(numel)
            else:
                wanted = torch.full((numel,), float(sum(peer + step for peer in range(size))))
            assert torch.equal(output, wanted)

    run_ranks(4, body, timeout=120)


def test_two_groups_at_once() -> None:
    def body(rank: int, size: int) -> None:
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[rank // 2]
        for _ in range(10):
            whole, half = [torch.zeros(100 * size)], [torch.zeros(100 * 2)]
            works = [
                gather(whole, [torch.full((100,), float(rank))]),
                gather(half, [torch.full((100,), float(rank))], mine),
            ]
            for work in works:
                work.wait()
            assert torch.equal(whole[0].view(size, -1)[:, 0], torch.arange(float(size)))
            assert torch.equal(half[0].view(2, -1)[:, 0], torch.arange(2.0) + rank // 2 * 2)

    run_ranks(4, body)


def test_flight_record_is_json() -> None:
    import json

    def body(rank: int, size: int) -> Any:
        gather([torch.zeros(2 * size)], [torch.zeros(2)]).wait()
        return json.loads(tide.of().flight_record())

    for record in run_ranks(2, body):
        assert len(record) >= 1
