"""A stand-in for tide._C in one piece of Python: plans, slots and reductions by the process group's
own collectives.

It keeps the contract's bookkeeping (who holds a slot, which slots are free, who may lease) and
raises where the seam breaks it, so protocol mistakes show without the compiled module. Sums are in
fp32, in rank order.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field

import torch
import torch.distributed as dist


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


@dataclass
class Backend:
    group: dist.ProcessGroup
    plans: list = field(default_factory=list)
    free: list = field(default_factory=list)
    shared: int = 0
    log: list = field(default_factory=list)
    options: types.SimpleNamespace = field(
        default_factory=lambda: types.SimpleNamespace(fsdp="both", memory_mode="in_place")
    )

    def __hash__(self):
        return id(self)

    def plan(self, requests, prefetch_depth):
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
        if not p.own:
            if not self.free:
                return None
            p.slot = self.free.pop(0)
        else:
            p.slot = 1000 + plan
        self.log.append(("gather", p.request.name, p.slot))
        for spec, shard, output in zip(p.request.parameters, shards, outputs, strict=True):
            assert output.untyped_storage().size() == 0 and shard.dtype == spec.shard_dtype
            output.untyped_storage().resize_(output.numel() * output.itemsize)
            parts = [
                torch.empty(spec.shard_numel, dtype=spec.dtype) for _ in range(self.group.size())
            ]
            dist.all_gather(parts, shard.to(spec.dtype), group=self.group)
            with torch.autograd._unsafe_preserve_version_counter(output), torch.no_grad():
                output.copy_(torch.stack([x.view(spec.rows, -1) for x in parts], 1).view(-1))
        return Done(p.slot)

    def vacate(self, plan):
        p = self.plans[plan]
        assert p.slot != -1, f"{p.request.name} holds no slot"
        self.log.append(("vacate", p.request.name, p.slot))
        if not p.own:
            self.free.append(p.slot)
        p.slot = -1

    def reduce(self, plan, parameters, gradients, output, op, scale, slot_reuse):
        p = self.plans[plan]
        self.log.append(("reduce", p.request.name, slot_reuse))
        assert not slot_reuse or p.slot == -1
        ranks, rank, at = self.group.size(), self.group.rank(), 0
        for index, gradient in zip(parameters, gradients, strict=True):
            spec = p.request.parameters[index]
            assert gradient.is_contiguous() and gradient.numel() == spec.unsharded_numel
            full = torch.zeros(spec.shard_numel * ranks, dtype=gradient.dtype)
            full[: gradient.numel()] = gradient.reshape(-1)
            parts = [torch.empty_like(full) for _ in range(ranks)]
            dist.all_gather(parts, full, group=self.group)
            total = torch.zeros(spec.shard_numel * ranks, dtype=torch.float32)
            for part in parts:
                total += part.float()
            mine = total.view(spec.rows, ranks, -1)[:, rank].reshape(-1) * scale
            output[at : at + spec.shard_numel] = mine.to(output.dtype)
            at += spec.shard_numel
        assert at == output.numel()
        return Done()

    def counters(self):
        return {"arena_bytes": 0}


def use() -> dict:
    """Puts the stand-in where the seam looks for the compiled module. Returns the backends by
    process group name."""
    module = types.ModuleType("tide._C")
    for name in ("Backend", "PlanRequest", "ParameterSpec", "PlanAnswer"):
        setattr(module, name, globals()[name])
    sys.modules["tide._C"] = module
    from tide.fsdp import backends

    made: dict = {}

    def find(group, device):
        return made.setdefault(group.group_name, Backend(group))

    backends.find = find
    backends.compiled = lambda: module
    return made
