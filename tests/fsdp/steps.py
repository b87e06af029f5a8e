"""The small model, sharded by block, and training steps of it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from cases import by_block
from models import WORDS, Model, loss_of
from torch.distributed.fsdp import MixedPrecisionPolicy
from trial import Setting


def build(engine: str = "tide", policy: MixedPrecisionPolicy | None = None, **keywords: Any) -> Any:
    torch.manual_seed(0)
    model = Model()
    by_block(model, Setting(engine), mp_policy=policy or MixedPrecisionPolicy(), **keywords)
    return model


def words(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randint(0, WORDS, (2, 7), generator=generator)


def step(model: Any, optimizer: Any = None, seed: int = 0) -> float:
    loss = loss_of(model, words(seed))
    loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)
