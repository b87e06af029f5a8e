"""pytorch 102821, torchtitan 811.

A checkpoint of 2 ranks is loaded by 5 and by 8, whose shards of 6 rows are uneven or empty; there
loading failed, or the optimizer's state did. Right: model and optimizer load, and training goes on
as in one process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from harness import run_ranks
from reference import assert_close, assert_served, numbers, sharded, weights
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def build() -> tuple[Any, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(index, *parameter.shape))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def build_sharded() -> tuple[Any, torch.optim.Optimizer]:
    model, _ = build()
    sharded(model, model[0], model[2])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Every rank sees the same batch, so the mean over ranks is that of one process."""
    optimizer.zero_grad()
    model(numbers(40 + seed, 5, 4)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("ranks", [5, 8])
def test_two_ranks_resume_on_more(ranks: int, tmp_path: Path) -> None:
    def save(rank: int, size: int) -> None:
        model, optimizer = build_sharded()
        for seed in range(2):
            step(model, optimizer, seed)
        state, moments = get_state_dict(model, optimizer)
        checkpoint.save({"model": state, "moments": moments}, checkpoint_id=tmp_path / "saved")

    def resume(rank: int, size: int) -> None:
        model, optimizer = build_sharded()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        state, moments = get_state_dict(model, optimizer)
        loaded = {"model": state, "moments": moments}
        checkpoint.load(loaded, checkpoint_id=tmp_path / "saved")
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["moments"],
        )
        step(model, optimizer, 2)
        alone, alone_optimizer = build()
        for seed in range(3):
            step(alone, alone_optimizer, seed)
        assert_close(weights(model), weights(alone))
        assert_served(model)

    run_ranks(2, save, timeout=120)
    run_ranks(ranks, resume, timeout=200, group_timeout=150)
