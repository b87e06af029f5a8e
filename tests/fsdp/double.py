"""A stand-in for tide._C in one piece of Python: plans, slots and reductions by the process group's
own collectives.

It keeps the contract's bookkeeping (who holds a slot, which slots are free, who may lease) and
raises where the seam breaks it, so protocol mistakes show without the compiled module. Sums are in
fp32, in rank order; with TIDE_NODE_SIZE those of each node first, then those of the nodes, from the
own one backwards.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from node_order import order_of_sums, sum_in_order
from tide.fsdp import backends


@dataclass
class ParameterSpec:
    name: str
    dtype: torch.dtype
    shard_dtype: torch.dtype
    shard_numel: int
    unsharded_numel: int
    rows: int = 1


@dataclass
class PlanRequest:
    name: str
    parameters: list
    refusal: str = ""
    serve_gather: bool = True
    serve_reduce: bool = True
    stays_unsharded: bool = False
    may_lease: bool = True
    gradient_dtype: torch.dtype = torch.bfloat16


@dataclass
class PlanAnswer:
    accepted: bool
    reason: str
    plan: int
    staging: str
    slot_bytes: int


class Done:
    """A work that is complete; remembers what was waited for."""

    def __init__(self, slot=-1):
        self.slot = slot

    def wait(self, timeout=None):
        return True

    def wait_read(self):
        return None


@dataclass
class Plan:
    request: PlanRequest
    slot: int = -1
    own: bool = False


@dataclass(eq=False)
class Backend:
    group: dist.ProcessGroup
    options: Any
    plans: list = field(default_factory=list)
    free: list = field(default_factory=list)
    shared: int = 0
    log: list = field(default_factory=list)

    def plan(self, requests, prefetch_depth, device=None):
        mine = [
            (r.refusal, r.name, [(p.shard_numel, p.dtype) for p in r.parameters]) for r in requests
        ]
        everyone = [None] * self.group.size()
        dist.all_gather_object(everyone, mine, group=self.group)
        answers = []
        for index, request in enumerate(requests):
            refused = [(r, e[index][0]) for r, e in enumerate(everyone) if e[index][0]]
            if refused:
                rank, reason = refused[0]
                answers.append(PlanAnswer(False, f"rank {rank}: {reason}", -1, "none", 0))
                continue
            self.plans.append(Plan(request, own=request.stays_unsharded))
            nbytes = sum(
                p.shard_numel * p.dtype.itemsize * self.group.size() for p in request.parameters
            )
            staging = (
                "none" if not request.serve_reduce else "leased" if request.may_lease else "area"
            )
            answers.append(PlanAnswer(True, "", len(self.plans) - 1, staging, nbytes))
        while self.shared < prefetch_depth + 1:
            self.free.append(self.shared)
            self.shared += 1
        return answers

    def gather(self, plan, shards, outputs):
        p = self.plans[plan]
        assert p.slot == -1, f"{p.request.name} gathers while it holds slot {p.slot}"
        settle(
            shards
        )  # the storages below come from the allocator again: nobody may still read them
        if not p.own:
            if not self.free:
                return None
            p.slot = self.free.pop(0)
        else:
            p.slot = 1000 + plan
        self.log.append(("gather", p.request.name, p.slot))
        specs, ranks = p.request.parameters, self.group.size()
        mine = torch.cat(
            [x.to(s.dtype).view(torch.uint8) for s, x in zip(specs, shards, strict=True)]
        )
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        at = 0
        for spec, shard, output in zip(specs, shards, outputs, strict=True):
            assert output.untyped_storage().size() == 0 and shard.dtype == spec.shard_dtype
            output.untyped_storage().resize_(output.numel() * output.itemsize)
            end = at + spec.shard_numel * output.itemsize
            parts = [x[at:end].clone().view(output.dtype).view(spec.rows, -1) for x in everyone]
            output.data.copy_(torch.stack(parts, 1).view(-1))
            at = end
        return Done(p.slot)

    def vacate(self, plan):
        p = self.plans[plan]
        assert p.slot != -1, f"{p.request.name} holds no slot"
        self.log.append(("vacate", p.request.name, p.slot))
        if not p.own:
            self.free.append(p.slot)
        p.slot = -1

    def reduce(self, plan, parameters, gradients, output, op, scale, slot_reuse):
        settle(gradients)
        p = self.plans[plan]
        self.log.append(("reduce", p.request.name, slot_reuse))
        ranks, rank = self.group.size(), self.group.rank()
        summed_in = torch.float64 if output.dtype == torch.float64 else torch.float32
        padded = []
        for index, gradient in zip(parameters, gradients, strict=True):
            spec = p.request.parameters[index]
            assert gradient.is_contiguous() and gradient.numel() == spec.unsharded_numel
            full = torch.zeros(spec.shard_numel * ranks, dtype=summed_in, device=gradient.device)
            full[: gradient.numel()] = gradient.reshape(-1)
            padded.append(full.view(spec.rows, ranks, -1).transpose(0, 1).reshape(ranks, -1))
        mine = torch.cat(padded, 1)
        everyone = [torch.empty_like(mine) for _ in range(ranks)]
        dist.all_gather(everyone, mine, group=self.group)
        total = sum_in_order([part[rank] for part in everyone], order_of_sums(self.group))
        output.copy_(total * scale)
        assert total.numel() == output.numel()
        return Done()

    def forget(self, plan):
        """Models are few in a test: nothing is taken back."""

    def counters(self):
        return {"arena_bytes": 0, "plans": 0}

    def no_multicast(self):
        return None


def settle(tensors):
    """On a GPU: the host waits for all that it has enqueued, as this stand-in has no events."""
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize()


@contextlib.contextmanager
def standing_in(fsdp: str = "both", memory_mode: str = "in_place") -> Iterator[dict[str, Backend]]:
    """The seam finds stand-ins for process groups that are not tide's. Yields them by group
    name."""
    made: dict[str, Backend] = {}
    options = types.SimpleNamespace(fsdp=fsdp, memory_mode=memory_mode)
    find, compiled = backends.find, backends.compiled

    def find_or_stand_in(group: dist.ProcessGroup, device: torch.device) -> Any:
        return made.setdefault(group.group_name, Backend(group, options))

    backends.find = find_or_stand_in
    backends.compiled = lambda: sys.modules[__name__]
    try:
        yield made
    finally:
        backends.find, backends.compiled = find, compiled
