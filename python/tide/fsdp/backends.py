"""Where the seam meets the compiled module: the tide backend behind a process group, and its
settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from tide import _C


@dataclass(frozen=True)
class Settings:
    directions: str  # "both", "gather", "reduce" or "0"
    memory: str  # IN_PLACE or SLOT_REUSE

    @property
    def gathers(self) -> bool:
        return self.directions in ("both", "gather")

    @property
    def reduces(self) -> bool:
        return self.directions in ("both", "reduce")


class DryBackend:
    """Stands for the backend of a process group that has no peers: answers votes as if every rank
    asked alike, and moves nothing."""

    def __init__(self, options: _C.Options, ranks: int) -> None:
        self.options = options
        self.ranks = ranks
        self.depth = 0
        self.plans: list[_C.DryPlan] = []

    def plan(
        self, requests: list[_C.PlanRequest], prefetch_depth: int, *_: torch.device
    ) -> list[_C.PlanAnswer]:
        self.depth = prefetch_depth
        made = compiled().dry_plan(requests, self.ranks, prefetch_depth, self.options)
        self.plans.append(made)
        answers: list[_C.PlanAnswer] = made.answers
        return answers

    def counters(self) -> dict[str, int]:
        accepted = sum(answer.accepted for plan in self.plans for answer in plan.answers)
        arena_bytes = sum(plan.arena_bytes for plan in self.plans)
        return {"arena_bytes": arena_bytes, "plans": accepted}

    def no_multicast(self) -> str | None:
        """No GPU is used."""
        return None

    def forget(self, plan: int) -> None:
        """Nothing is held."""


def compiled() -> Any:
    """The module tide._C; imported late, as `import tide` must work where it was not built."""
    from tide import _C

    return _C


def find(group: dist.ProcessGroup, device: torch.device) -> _C.Backend | None:
    """The tide backend that serves `device` in this process group; None when another backend
    does."""
    from tide import groups

    return groups.of(group, device)


def settings(backend: _C.Backend) -> Settings:
    """What TIDE_FSDP and TIDE_MEMORY_MODE, or the group's own options, said when the group was
    made."""
    options: Any = backend.options
    return Settings(directions=options.fsdp, memory=options.memory_mode)
