"""Trains the demonstration's model on one backend and measures it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide.demo import measure
from tide.demo.model import Model, Shape, batch_of


@dataclass(frozen=True)
class Job:
    shape: Shape
    steps: int
    sequences: int
    """Sequences a rank and step."""
    text: Tensor
    rank: int
    world: int


@dataclass
class Result:
    """What one backend's run gave. Times in milliseconds a step on this rank, bytes a step on this
    rank."""

    backend: str
    losses: list[float] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    communication_times: list[float] = field(default_factory=list)
    optimizer_times: list[float] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)
    copy_time: float = 0.0
    written_bytes: int | None = None
    least_bytes: int = 0
    gather_calls: int = 0
    reduce_calls: int = 0

    def step_time(self) -> float:
        return median(self.step_times)

    def communication_time(self) -> float:
        return median(self.communication_times)

    def optimizer_time(self) -> float:
        return median(self.optimizer_times)


def build(job: Job) -> nn.Module:
    """The sharded model, the same weights for every backend: bf16 to compute and to gather, fp32 to
    keep and to sum."""
    torch.manual_seed(0)
    model = Model(job.shape)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (job.world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up over 10 steps, then a cosine to a tenth."""
    warm = min(1.0, (step + 1) / 10)
    cosine = float(torch.cos(torch.tensor(torch.pi * step / max(steps, 1))))
    return 3e-3 * warm * (0.55 + 0.45 * cosine)


def train(job: Job, model: nn.Module, backend: str, progress: Callable[[float], None]) -> Result:
    """`job.steps` measured steps, then one more under the profiler. Collective: every rank calls it
    alike."""
    result = Result(backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    loss_sum = torch.zeros(1)

    def one_step(step: int) -> float:
        symbols, target = batch_of(job.text, step, job.rank, job.sequences, job.shape.context)
        logits = model(symbols)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        loss.backward()
        start = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_sum[0] = loss.detach()
        return time.perf_counter() - start

    with measure.CommunicationClock() as clock:
        for step in range(job.steps):
            dist.barrier()
            clock.take()
            start = time.perf_counter()
            optimizer_time = one_step(step)
            result.step_times.append(1e3 * (time.perf_counter() - start))
            result.communication_times.append(1e3 * sum(clock.take()))
            result.optimizer_times.append(1e3 * optimizer_time)
            dist.all_reduce(loss_sum)
            result.losses.append(loss_sum.item() / job.world)
            progress(result.losses[-1])

    dist.barrier()
    before = measure.counters()
    with measure.CommunicationClock() as clock:
        if job.rank == 0:
            result.copies, result.copy_time = measure.layout_copies(lambda: one_step(job.steps))
        else:
            one_step(job.steps)
    after = measure.counters()
    if before or after:
        result.written_bytes = measure.written_bytes(before, after)
    for group in measure.groups_of(model):
        gather, reduce = measure.least_bytes(group, job.world, torch.bfloat16, torch.bfloat16)
        result.least_bytes += gather * clock.gathers[group] + reduce * clock.reduces[group]
        result.gather_calls += clock.gathers[group]
        result.reduce_calls += clock.reduces[group]
    return result


def start_backend(name: str) -> None:
    """The one line that differs between the two runs."""
    dist.init_process_group(backend=name, timeout=timedelta(seconds=120))
