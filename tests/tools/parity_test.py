"""`tide parity`: the procedure against small arithmetic, ways to log a loss, and whole runs."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tide import parity
from tide.parity import compare
from tide.parity.recorder import Recorder
from tide.parity.runs import Plan


def test_moving_means() -> None:
    losses = {step: float(step) for step in range(10)}
    assert compare.moving_means(losses, 4, 6) == {6: 4.5, 7: 5.5, 8: 6.5, 9: 7.5}
    assert compare.moving_means(losses, 20, 0) == {}


def test_the_distance_is_the_largest_relative_one() -> None:
    stock = dict.fromkeys(range(8), 2.0)
    other = {**stock, 6: 2.2}
    assert compare.distance(other, stock, 2, 4) == pytest.approx(0.1 / 2)
    assert compare.distance(other, stock, 1, 4) == pytest.approx(0.1)
    assert compare.distance(stock, dict(stock), 2, 4) == 0


def runs(second: float, tide: float, third: float = 2.0) -> dict[str, compare.Losses]:
    values = {"stock 1": 2.0, "stock 2": second, "tide": tide, "stock, reordered": third}
    return {name: dict.fromkeys(range(4), value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("found", "within", "yardstick"),
    [
        (runs(2.02, 2.01), True, 0.01),
        (runs(2.02, 2.03), False, 0.01),
        (runs(2.0, 2.01, 2.04), True, 0.02),  # bit-equal stock runs: the reordered one measures
        (runs(2.0, 2.01), None, 0.0),  # nothing to measure by
        (runs(2.0, 2.0), True, 0.0),
        (runs(2.0, 2.000001, 2.0000001), True, 5e-8),  # rounding of the loss itself
    ],
)
def test_verdicts(found: dict[str, compare.Losses], within: bool | None, yardstick: float) -> None:
    verdict = compare.judge(found, "tide", ("stock 2", "stock, reordered"), 2, 0)
    assert verdict.within is within
    assert verdict.yardstick == pytest.approx(yardstick)


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("step 7 loss 1.5", (7, 1.5)),
        ("[2026-01-01] Step: 12 | train_loss: 3.25e-1, lr 3", (12, 0.325)),
        ("\x1b[31mstep: 3  loss:  8.1250 \x1b[0m grad_norm: 1.0", (3, 8.125)),
        ("iteration 4: loss=2", (4, 2.0)),
        ("loss 0.5", (0, 0.5)),
        ('{"step": 9, "loss": 0.25}', (9, 0.25)),
        ('{"iter": 2, "train/loss": 1}', (2, 1.0)),
    ],
)
def test_lines_that_tell_a_loss(line: str, row: tuple[int, float]) -> None:
    recorder = Recorder()
    recorder.line(line)
    ((step, loss, _),) = next(iter(recorder.by_source.values()))
    assert (step, loss) == row


def test_losses_that_are_no_numbers_count() -> None:
    recorder = Recorder()
    recorder.line("step 1 loss 2.0")
    recorder.line("step 2 loss nan")
    recorder.line('{"step": 3, "loss": -Infinity}')
    assert math.isnan(recorder.by_source["text"][1][1])
    assert recorder.by_source["json"][0][1] == -math.inf


def test_a_loss_that_is_not_finite_is_outside() -> None:
    found = runs(2.02, 2.0)
    found["tide"] = {**found["tide"], 3: math.nan}
    verdict = compare.judge(found, "tide", ("stock 2", "stock, reordered"), 2, 0)
    assert verdict.within is False and "tide is not finite at step 3" in verdict.sentence
    found["stock 2"] = {**found["stock 2"], 1: math.inf}
    verdict = compare.judge(found, "tide", ("stock 2", "stock, reordered"), 2, 0)
    assert verdict.within is None and "stock 2 is not finite at step 1" in verdict.sentence


def test_a_run_that_ends_early_is_outside() -> None:
    found = runs(2.02, 2.0)
    found["tide"] = {0: 2.0, 1: 2.0}
    verdict = compare.judge(found, "tide", ("stock 2",), 2, 0)
    assert verdict.within is False and "ended at step 1, the stock runs at 3" in verdict.sentence


@pytest.mark.parametrize(
    "line",
    ["lossless codec 3", "step 3", "glossy loss", "step 3 val loss 2.5", '{"eval_loss": 1.0}'],
)
def test_lines_that_tell_none(line: str) -> None:
    recorder = Recorder()
    recorder.line(line)
    assert not any(recorder.by_source.values())


def test_a_run_is_kept_while_nothing_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, kept = tmp_path / "train.py", tmp_path / "result.json"
    script.write_text("a")
    plan = Plan(script, ("--steps", "3"), 2, "", "", 1, tmp_path)
    assert plan.kept("tide", kept) is None
    kept.write_text(json.dumps({"key": plan.key("tide"), "losses": [[0, 1.0]]}))
    assert plan.kept("tide", kept) is not None
    assert plan.kept("stock 1", kept) is None
    assert replace(plan, again=True).kept("tide", kept) is None
    for change in ({"seed": 2}, {"ranks": 3}, {"arguments": ("--steps", "4")}):
        assert replace(plan, **change).kept("tide", kept) is None
    monkeypatch.setenv("TIDE_MEMORY_MODE", "slot_reuse")
    assert plan.kept("tide", kept) is None
    monkeypatch.undo()
    assert plan.kept("tide", kept) is not None
    script.write_text("b")
    assert plan.kept("tide", kept) is None
    for broken in ('{"key": "', "[]", '{"key": 3}'):
        kept.write_text(broken)
        assert plan.kept("tide", kept) is None


def test_log_outside_a_run_does_nothing() -> None:
    parity.log(1, 2.0)
    assert parity.current is None


WAYS = """
import json, os, sys
import tide.parity
way = sys.argv[1]
for step in range(6):
    loss = 1 / (step + 1)
    if way == "print":
        print("iteration", step, "| loss:", loss, "| val loss: 9", flush=True)
    elif way == "json":
        print(json.dumps({"step": step, "loss": loss}))
    elif way == "file":
        print("loss 7")  # the file is more explicit
        with open(f"metrics.{os.environ['RANK']}.jsonl", "a") as file:
            json.dump({"step": step, "loss": loss}, file)
            file.write("\\n")
    elif way == "callback":
        print("loss 7")
        tide.parity.log(step, loss)
    elif way == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter("events")
        writer.add_scalar("loss/val", 9.0, step)
        writer.add_scalar("loss/train", loss, global_step=step)
"""


def ways() -> list[Any]:
    missing = find_spec("tensorboard") is None
    absent = pytest.mark.skipif(missing, reason="the package tensorboard is not installed")
    return ["print", "json", "file", "callback", pytest.param("tensorboard", marks=absent)]


@pytest.mark.parametrize("way", ways())
def test_ways_to_log(tmp_path: Path, way: str) -> None:
    (tmp_path / "train.py").write_text(WAYS)
    settings = {"backend": "", "stock": "", "seed": 1, "reordered": False, "symmetric": False}
    command = [sys.executable, "-m", "tide.parity.rank", json.dumps(settings), str(tmp_path)]
    done = subprocess.run(
        [*command, "train.py", way],
        cwd=tmp_path,
        env={**os.environ, "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "rank.0.json").read_text())["rows"]
    assert [(step, loss) for step, loss, _ in rows] == [(i, 1 / (i + 1)) for i in range(6)]


SCRIPT = """
import sys, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
import tide
dist.init_process_group(backend="gloo")
backend = dist.get_backend()
model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 8))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(12):
    torch.manual_seed(step * 100 + dist.get_rank())
    loss = (model(torch.randn(16, 32)) - 1).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"step {step} loss {mean.item() / dist.get_world_size():.9f} on {backend}")
dist.barrier()  # no rank leaves while Gloo still serves another
dist.destroy_process_group()
"""


@pytest.mark.timeout(280)
def test_three_ranks_from_start_to_verdict(tide, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["train.py", "--ranks", "3", "--window", "2", "--json"]
    done = tide("parity", *options, seconds=270)
    assert done.returncode in (0, 1), done.stderr
    result = json.loads(done.stdout)
    assert set(result["runs"]) == {"stock 1", "stock 2", "tide", "stock, reordered"}
    assert result["stock_runs_bit_equal"]
    out = tmp_path / "tide-parity"
    backends = {
        name: (out / name / "log").read_text().split(" on ")[1].split()[0]
        for name in ("stock-1", "stock-2", "tide", "stock-reordered")
    }
    assert backends == {**dict.fromkeys(backends, "gloo"), "tide": "tide"}
    assert {row["steps"] for row in result["runs"].values()} == {12}
    assert result["distance"] < 1e-4
    assert (out / "parity.png").read_bytes().startswith(b"\x89PNG")
    # Kept runs are not repeated; a changed one is.
    times = {p: p.stat().st_mtime_ns for p in out.glob("*/result.json")}
    assert json.loads(tide("parity", *options).stdout) == result
    text = tide("parity", *options[:-1]).stdout
    assert result["sentence"] in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 100
    assert times == {p: p.stat().st_mtime_ns for p in out.glob("*/result.json")}


def test_a_fourth_run_that_fails_leaves_the_verdict(tide, tmp_path: Path) -> None:
    """Of a script that knows two backends; stock runs are of one rank and bit-equal."""
    (tmp_path / "train.py").write_text(
        "import torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "print('step 0 loss 1.5')\n"
        "dist.destroy_process_group()\n"
    )
    options = ["train.py", "--ranks", "1", "--also", "telepathy"]
    done = tide("parity", *options)
    assert done.returncode == 0, done.stderr
    assert "tide is bit-equal to stock" in done.stdout
    assert "note: run 'telepathy' ended with 1" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
    (sentence,) = json.loads(tide("parity", *options, "--json").stdout)["failed_runs"]
    assert "telepathy" in sentence


def test_a_script_that_logs_nothing_or_fails(tide, tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("")
    (tmp_path / "wrong.py").write_text("raise KeyError('no such thing')")
    done = tide("parity", "quiet.py", "--ranks", "1", "--out", "a")
    assert done.returncode == 2 and "logged no loss" in done.stderr
    done = tide("parity", "wrong.py", "--ranks", "1", "--out", "b")
    assert done.returncode == 2 and "KeyError: 'no such thing'" in done.stderr
    assert tide("parity", "nofile.py").returncode == 2
