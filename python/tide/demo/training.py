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
    inside_times: list[float] = field(default_factory=list)
    """In FSDP2's communication calls; waiting there for slower ranks included."""
    alone_times: list[float] = field(default_factory=list)
    """Forward and backward of an unsharded bf16 model, on all ranks at once, nothing sent."""
    optimizer_times: list[float] = field(default_factory=list)
    copies: dict[str, int] = field(default_factory=dict)
    copy_time: float = 0.0
    written_bytes: int | None = None
    least_bytes: int = 0
    gather_calls: int = 0
    reduce_calls: int = 0

    def step_time(self) -> float:
        return median(self.step_times)

    def alone_time(self) -> float:
        return median(self.alone_times)

    def inside_time(self) -> float:
        return median(self.inside_times)

    def optimizer_time(self) -> float:
        return median(self.optimizer_times)

    def communication_time(self) -> float:
        """What communication adds to a step, whoever pays for it: threads, copies, waiting."""
        return max(0.0, self.step_time() - self.alone_time() - self.optimizer_time())


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


class Trainer:
    """Steps of one model on one backend. Every method is collective: all ranks call it alike."""

    def __init__(self, job: Job, model: nn.Module, backend: str) -> None:
        self.job, self.model = job, model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.plain = Model(job.shape).bfloat16()
        self.result = Result(backend)

    def train(self, progress: Callable[[float], None]) -> None:
        """`job.steps` measured steps; `progress` hears each step's loss, the mean over the
        ranks."""
        job, result = self.job, self.result
        loss = torch.zeros(1)
        with measure.CommunicationClock() as clock:
            for step in range(job.steps):
                dist.barrier()
                clock.take()
                start = time.perf_counter()
                loss[0] = self._forward_backward(step)
                middle = time.perf_counter()
                self._update(step)
                updated = time.perf_counter()
                dist.barrier()
                end = time.perf_counter()
                result.step_times.append(1e3 * (end - start))
                result.optimizer_times.append(1e3 * (updated - middle))
                result.inside_times.append(1e3 * sum(clock.take()))
                dist.all_reduce(loss)
                result.losses.append(loss.item() / job.world)
                progress(result.losses[-1])
                if step % max(1, job.steps // 10) == 0:
                    self._compute_alone(step)

    def count(self) -> None:
        """One more step: layout copies by torch's profiler on rank 0, and bytes."""
        job, result = self.job, self.result
        before = measure.counters()
        with measure.CommunicationClock() as clock:
            if job.rank == 0:
                result.copies, result.copy_time = measure.layout_copies(
                    lambda: self._forward_backward(job.steps)
                )
            else:
                self._forward_backward(job.steps)
        after = measure.counters()
        self._update(job.steps)
        if before or after:
            result.written_bytes = measure.written_bytes(before, after)
        for group in measure.groups_of(self.model):
            gather, reduce = measure.least_bytes(
                group, job.rank, job.world, torch.bfloat16, torch.bfloat16
            )
            result.least_bytes += gather * clock.gathers[group] + reduce * clock.reduces[group]
            result.gather_calls += clock.gathers[group]
            result.reduce_calls += clock.reduces[group]

    def _compute_alone(self, step: int) -> None:
        """Times forward and backward of an unsharded bf16 model of this shape on every rank."""
        dist.barrier()
        start = time.perf_counter()
        self._forward_backward(step, self.plain)
        dist.barrier()
        self.result.alone_times.append(1e3 * (time.perf_counter() - start))
        self.plain.zero_grad(set_to_none=True)

    def _forward_backward(self, step: int, model: nn.Module | None = None) -> float:
        job = self.job
        symbols, target = batch_of(job.text, step, job.rank, job.sequences, job.shape.context)
        logits = (model or self.model)(symbols)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        loss.backward()
        return loss.item()

    def _update(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self.job.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def start_backend(name: str) -> None:
    """The one line that differs between the two runs."""
    dist.init_process_group(backend=name, timeout=timedelta(seconds=120))
