"""What `tide bench` measures, inside the ranks. Every case alternates its variants, repetition by
repetition.

Times are milliseconds after a barrier.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tide.demo import measure
from tide.demo.model import Model, Shape, batch_of, read_text

Samples = dict[str, list[float]]


Span = tuple[float, float]


def span_of(ranks: Sequence[Span]) -> float:
    """Milliseconds from the first start to the last end. perf_counter is the same clock everywhere
    on a host."""
    return 1e3 * (max(end for _, end in ranks) - min(start for start, _ in ranks))


class Bench:
    """The process groups and settings that all cases share."""

    def __init__(
        self, repetitions: int, operation_mib: int, path_mib: int, other: str = "tide"
    ) -> None:
        self.repetitions = repetitions
        self.operation_bytes = operation_mib << 20
        self.path_bytes = path_mib << 20
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        assert dist.group.WORLD is not None
        self.groups: dict[str, Any] = {"gloo": dist.group.WORLD}
        if other != "gloo":
            self.groups[other] = dist.new_group(backend=other)

    def alternate(self, variants: dict[str, Callable[[], None]], warm_up: int = 3) -> Samples:
        """Times each variant `repetitions` times, the order turning each time.

        A sample is from the first rank's start to the last rank's end, on the host's one clock.
        """
        names = list(variants)
        spans: dict[str, list[Span]] = {name: [] for name in names}
        for repetition in range(-warm_up, self.repetitions):
            turn = repetition % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                start = time.perf_counter()
                variants[name]()
                if repetition >= 0:
                    spans[name].append((start, time.perf_counter()))
        everyone = self.everyone(spans)
        return {
            name: [span_of(ranks) for ranks in zip(*everyone[name], strict=True)] for name in names
        }

    def slowest(self, mine: Samples) -> Samples:
        """Each sample replaced by that of the slowest rank."""
        everyone = self.everyone(mine)
        return {
            name: [max(samples) for samples in zip(*everyone[name], strict=True)] for name in mine
        }

    def everyone(self, mine: dict[str, Any]) -> dict[str, list[Any]]:
        """Name -> every rank's value, in rank order."""
        ranks: list[Any] = [None] * self.world
        dist.all_gather_object(ranks, mine)
        return {name: [one[name] for one in ranks] for name in mine}

    def counters(self) -> dict[str, int]:
        return measure.counters(self.groups["tide"])


def block_shapes(gathered_bytes: int, world: int) -> list[tuple[int, int]]:
    """Nine bf16 parameters like a Llama block's, `gathered_bytes` together, as (rows of a shard,
    columns).

    With hidden = 2.75 width: 4 width^2 + 3 * 2.75 width^2 + 2 width elements; widths are multiples
    of 4 * world.
    """
    step = 4 * world
    width = max(step, int((gathered_bytes / 2 / 12.25) ** 0.5) // step * step)
    hidden = width * 11 // 4
    shard, hidden_shard = width // world, hidden // world
    square, wide = (shard, width), (hidden_shard, width)
    return [(shard, 1), *[square] * 4, (shard, 1), wide, wide, (shard, hidden)]


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def empty(bench: Bench, shapes: Sequence[tuple[int, int]]) -> dict[str, list[Tensor]]:
    """The same list twice: ordinary memory for gloo, tide's own for tide."""
    import tide

    plain = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
    straight = [
        tide.empty(*shape, dtype=torch.bfloat16, group=bench.groups["tide"]) for shape in shapes
    ]
    return {"gloo": plain, "tide": straight}


def memory_copy(count: int) -> Callable[[], None]:
    """Copies `count` bytes within this process: what all ranks together can write at best with
    plain copies."""
    source, target = torch.ones(count, dtype=torch.uint8), torch.ones(count, dtype=torch.uint8)

    def copy() -> None:
        target.copy_(source)

    return copy


def coalesced(group: dist.ProcessGroup, kind: str) -> Callable[..., Any]:
    """c10d's coalesced layout collective under the name that this torch gives it."""
    names = {
        "gather": ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
        "reduce": ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    }[kind]
    return next(getattr(group, name) for name in names if hasattr(group, name))


def gather_case(bench: Bench) -> dict[str, Any]:
    """Coalesced all-gather of nine bf16 parameters, beside one copy of the gathered bytes by all
    ranks at once."""
    shards = block_shapes(bench.operation_bytes, bench.world)
    inputs = [torch.full(shape, float(bench.rank + 1), dtype=torch.bfloat16) for shape in shards]
    outputs = empty(bench, [(rows * bench.world, columns) for rows, columns in shards])
    variants = {
        name: lambda name=name: coalesced(bench.groups[name], "gather")(
            outputs[name], inputs
        ).wait()
        for name in ("gloo", "tide")
    }
    total = bytes_of(outputs["gloo"])
    samples = bench.alternate({**variants, "memcpy": memory_copy(total)})
    for name, tensors in outputs.items():
        for output in tensors:
            for rank, part in enumerate(output.chunk(bench.world)):
                assert bool((part == rank + 1).all()), f"{name} gathered a wrong value"
    before = bench.counters()
    variants["tide"]()
    written = measure.written_bytes(before, bench.counters())
    return {
        "samples": samples,
        "bytes": total,
        "written_bytes": written,
        "least_bytes": bytes_of(inputs) * (bench.world - 1),
    }


def reduce_case(bench: Bench) -> dict[str, Any]:
    """Coalesced reduce-scatter, bf16 in and out (tide sums in fp32), beside one copy of the bytes
    that must move: each slice for another rank is read and written once, then the sum reads all
    slices of the own shard and writes it. A copy of n bytes reads and writes n, hence the half."""
    shards = block_shapes(bench.operation_bytes, bench.world)
    gradients = empty(bench, [(rows * bench.world, columns) for rows, columns in shards])
    outputs = empty(bench, shards)
    for tensors in gradients.values():
        for tensor in tensors:
            tensor.fill_(bench.rank + 1)
    variants = {
        name: lambda name=name: coalesced(bench.groups[name], "reduce")(
            outputs[name], gradients[name]
        ).wait()
        for name in ("gloo", "tide")
    }
    total = bytes_of(gradients["gloo"])
    sent = total * (bench.world - 1) // bench.world
    must_move = (2 * sent + total + total // bench.world) // 2
    samples = bench.alternate({**variants, "memcpy": memory_copy(must_move)})
    expected = bench.world * (bench.world + 1) / 2
    for name, tensors in outputs.items():
        assert all(bool((tensor == expected).all()) for tensor in tensors), f"{name} summed wrongly"
    before = bench.counters()
    variants["tide"]()
    written = measure.written_bytes(before, bench.counters())
    return {"samples": samples, "bytes": total, "written_bytes": written, "least_bytes": sent}


class GiveGradients(torch.autograd.Function):
    """Hands out ready gradients for `parameters`, so that a backward costs nothing but
    communication."""

    @staticmethod
    def forward(context: Any, x: Tensor, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        context.gradients = gradients
        return x.clone()

    @staticmethod
    def backward(context: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        return (outer[0], None, *context.gradients)


class Group(nn.Module):
    """Nine bf16 parameters in one FSDP2 group, no arithmetic."""

    def __init__(self, shards: list[tuple[int, int]], world: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(rows * world, columns, dtype=torch.bfloat16))
            for rows, columns in shards
        )
        self.gradients = [torch.ones_like(weight) for weight in self.weights]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = GiveGradients.apply(x, self.gradients, *self.weights)
        return out


def path_case(bench: Bench) -> dict[str, Any]:
    """FSDP2's whole path of one group: unshard and wait; post-backward with fp32 sums, freeing
    included."""
    shards = block_shapes(bench.path_bytes, bench.world)
    models = {}
    for name, group in bench.groups.items():
        mesh = DeviceMesh.from_group(group, "cpu")
        models[name] = Group(shards, bench.world)
        fully_shard(
            models[name], mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
        )
    gather: Samples = {name: [] for name in models}
    reduce: Samples = {name: [] for name in models}
    names = list(models)
    with measure.CommunicationClock() as clock:
        for repetition in range(-2, bench.repetitions):
            for name in names if repetition % 2 else names[::-1]:
                model = models[name]
                dist.barrier()
                clock.take()
                loss = model(torch.ones(1, requires_grad=True))
                dist.barrier()
                loss.backward()
                for parameter in model.parameters():
                    parameter.grad = None
                if repetition >= 0:
                    seconds = clock.take()
                    gather[name].append(1e3 * seconds[0])
                    reduce[name].append(1e3 * seconds[1])
    total = sum(rows * columns for rows, columns in shards) * bench.world * 2
    return {
        "unshard": bench.slowest(gather),
        "post_backward": bench.slowest(reduce),
        "bytes": total,
    }


def step_model(
    bench: Bench, group: dist.ProcessGroup, reduce_dtype: torch.dtype | None = torch.float32
) -> nn.Module:
    """The demonstration's model, a little wider: bf16 to compute and gather, fp32 to keep and
    sum."""
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(group, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model = Model(Shape())
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def one_step(bench: Bench, model: nn.Module, text: Tensor, step: int) -> None:
    symbols, target = batch_of(text, step, bench.rank, 2, 128)
    loss = nn.functional.cross_entropy(model(symbols).float().flatten(0, 1), target.flatten())
    loss.backward()


def without_communication(bench: Bench) -> nn.Module:
    """The same FSDP2 model in the state in which no communication is due: parameters stay
    unsharded after the first forward, gradients are not reduced. Its steps cost the arithmetic and
    FSDP2's own hooks."""
    model = step_model(bench, bench.groups["gloo"], reduce_dtype=None)
    assert isinstance(model, FSDPModule)
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    return model


def step_case(bench: Bench) -> dict[str, Any]:
    """Steps of the demonstration's model (no optimizer).

    `communication` is what a step costs more than one of `without_communication` in the same
    repetition; `inside` is the time in FSDP2's communication calls, waiting there for slower
    ranks included.
    """
    text = read_text(None)
    models = {name: step_model(bench, group) for name, group in bench.groups.items()}
    models["alone"] = without_communication(bench)
    whole: Samples = {name: [] for name in models}
    inside: Samples = {name: [] for name in models}
    names = list(models)
    with measure.CommunicationClock() as clock:
        for repetition in range(-2, bench.repetitions):
            turn = repetition % len(names)
            for name in names[turn:] + names[:turn]:
                dist.barrier()
                clock.take()
                start = time.perf_counter()
                one_step(bench, models[name], text, repetition + 2)
                dist.barrier()
                if repetition >= 0:
                    whole[name].append(1e3 * (time.perf_counter() - start))
                    inside[name].append(1e3 * sum(clock.take()))
                models[name].zero_grad(set_to_none=True)
    whole = bench.slowest(whole)
    communication = {
        name: [one - alone for one, alone in zip(whole[name], whole["alone"], strict=True)]
        for name in bench.groups
    }
    return {"step": whole, "communication": communication, "inside": bench.slowest(inside)}


CASES: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "gather": gather_case,
    "reduce": reduce_case,
    "path": path_case,
    "step": step_case,
}
