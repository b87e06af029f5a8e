"""Plans, gathers and reductions straight on a tide backend, without FSDP2."""

from __future__ import annotations

from typing import Any

import torch
from tide import _C


def plan_groups(backend: Any, *numels: int, depth: int = 1, **keywords: Any) -> list[int]:
    """One group of one fp32 parameter for each shard size; the plans' numbers."""
    keywords = {"may_lease": False, "gradient_dtype": torch.float32, **keywords}
    requests = []
    for index, numel in enumerate(numels):
        spec = _C.ParameterSpec(
            name="weight",
            dtype=torch.float32,
            shard_dtype=torch.float32,
            shard_numel=numel,
            unsharded_numel=numel * backend.size(),
        )
        requests.append(_C.PlanRequest(name=f"group {index}", parameters=[spec], **keywords))
    answers = backend.plan(requests, depth)
    assert all(answer.accepted for answer in answers), [answer.reason for answer in answers]
    return [answer.plan for answer in answers]


def start_gather(backend: Any, plan: int, shard: torch.Tensor) -> tuple[torch.Tensor, Any]:
    output = torch.empty(shard.numel() * backend.size())
    output.untyped_storage().resize_(0)
    return output, backend.gather(plan, [shard], [output])


def gathered(backend: Any, plan: int, shard: torch.Tensor, slot: int | None = None) -> torch.Tensor:
    output, work = start_gather(backend, plan, shard)
    assert work is not None and slot in (None, work.slot)
    work.wait()
    return output


def vacated(backend: Any, plan: int, output: torch.Tensor) -> None:
    output.untyped_storage().resize_(0)
    backend.vacate(plan)
