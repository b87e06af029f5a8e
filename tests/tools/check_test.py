"""`tide check` beside a run: the dry answer is what the report of real ranks says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

dist.init_process_group(sys.argv[1])
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = nn.Sequential(
    nn.Embedding(37, 24),
    nn.Linear(24, 48),
    nn.Sequential(nn.Linear(48, 96), nn.LayerNorm(96)),
    nn.Linear(96, 5),
)
device = "cuda" if torch.cuda.is_available() else "cpu"
model.to(device)
fully_shard(model[1], mp_policy=policy)
fully_shard(model[2], reshard_after_forward=False, mp_policy=policy)
fully_shard(model[3], mp_policy=policy)
fully_shard(model, mp_policy=policy)
model(torch.arange(6, device=device)).sum().backward()
import tide
if dist.get_rank() == 0:
    print(json.dumps(tide.report(model).to_dict()))
dist.destroy_process_group()
"""
NOT_PLANNED = ("gathers", "reduces", "stock_calls", "process_group", "waits")


def test_the_dry_answer_is_the_real_one(tide, torchrun, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    done = torchrun(3, script, "tide")
    assert done.returncode == 0, done.stderr
    real = json.loads(done.stdout)
    dry = tide("check", script, "--ranks", "3", "--json", "--", "nccl")
    assert dry.returncode == 0, dry.stderr
    found = json.loads(dry.stdout)
    for one, other in zip(real["rows"], found["groups"], strict=True):
        for name in set(other) - set(NOT_PLANNED):
            wanted = one[name].removeprefix("rank 0: ") if name == "reason" else one[name]
            assert other[name] == wanted, (one["group"], name)
    assert {row["path"] for row in found["groups"]} == {"tide"}
    assert found["arena_bytes"] == real["arena_bytes"]
    numel = 37 * 24 + (24 + 1) * 48 + (48 + 1) * 96 + 2 * 96 + (96 + 1) * 5
    assert found["parameters"] == numel


def test_on_a_device_that_is_not_here(tide, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = tide("check", "train.py", "--device", "cuda", "--ranks", "16", "--json", "--", "nccl")
    found = json.loads(done.stdout)
    text = tide("check", "train.py", "--device", "cuda", "--ranks", "16", "--", "nccl").stdout
    assert "4 of 4 groups on tide" in text and max(map(len, text.splitlines())) <= 100
    assert len(found["groups"]) == 4
    assert found["ranks"] == 16


HYBRID = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def build():
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)

def plain():
    return nn.Linear(2, 2)

def wrong():
    raise KeyError("no such thing")
"""


def test_a_function_on_a_mesh_of_its_own(tide, tmp_path: Path) -> None:
    (tmp_path / "hybrid.py").write_text(HYBRID)
    done = tide("check", "hybrid:build", "--json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["groups"]
    assert [(row["path"], row["ranks"]) for row in rows] == [("tide", 4)] * 2
    shard = (64 * 64 + 64) // 4
    assert {row["gathered_bytes"] for row in rows} == {3 * shard * 4 * 2}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nofile.py", "there is no script nofile.py"),
        ("hybrid:plain", "went through no fully_shard"),
        ("hybrid:wrong", "it raised KeyError at hybrid.py:"),
        ("hybrid:nothing", "has no function 'nothing'"),
        ("end.py", "ended with 3 before"),
        ("die.py", "its process ended with -9"),
        ("hang.py", "no forward in 8 seconds"),
    ],
)
def test_what_cannot_be_checked(tide, tmp_path: Path, target: str, said: str) -> None:
    (tmp_path / "hybrid.py").write_text(HYBRID)
    (tmp_path / "end.py").write_text("raise SystemExit(3)")
    (tmp_path / "die.py").write_text("import os; os.kill(os.getpid(), 9)")
    (tmp_path / "hang.py").write_text("import time; time.sleep(100)")
    done = tide("check", target, "--timeout", "8" if target == "hang.py" else "100")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith("tide: ") and said in last
