"""`tide simulate`: what it takes, what it says, and its numbers beside arithmetic."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tide.look import BadInput
from tide.simulate import clusters, memory, models, paper, run, step, systems
from tide.simulate.models import Group
from tide.simulate.step import COMPUTE, GATHER, REDUCE, Task
from tide.simulate.systems import Collective, Place

from tests.tools.conftest import Tide

BLOCK = Group("block", (4096, 1 << 24, 14336 * 4096), 2, 1 << 26, 4096, 7)


def spoken(answer: subprocess.CompletedProcess[str]) -> Any:
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


def one_sentence(answer: subprocess.CompletedProcess[str], *words: str) -> None:
    assert answer.returncode == 2, answer
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1, answer.stderr
    for word in words:
        assert word in answer.stderr


def place(nodes: int, locals_: int = 8, **more: Any) -> Place:
    return Place(clusters.find("dgx-h200"), nodes, locals_, **more)


# The verb.


def test_a_question_is_answered_in_text(tide: Tide) -> None:
    said = tide("simulate", "--gpus", "16", "--model", "llama-8b").stdout
    assert "simulated" in said
    for word in ("stock", "symmem", "tide", "exposed", "SM*s", "a rail", "memory", "doubling"):
        assert word in said
    assert max(map(len, said.splitlines())) <= 100


def test_json_adds_up(tide: Tide) -> None:
    told = spoken(tide("simulate", "--gpus", "32", "--model", "llama-8b", "--json"))
    assert told["kind"] == "simulated"
    assert told["nodes"] == 4 and told["gpus_per_node"] == 8
    by_name = {one["system"]: one for one in told["systems"]}
    stock, tides = by_name["stock"], by_name["tide"]
    for one in told["systems"]:
        assert one["exposed_s"] == pytest.approx(one["step_s"] - one["computing_s"])
        assert one["gain_over_stock"] == pytest.approx(1 - one["step_s"] / stock["step_s"])
        assert max(t["end_s"] for t in one["timeline"]) == pytest.approx(one["step_s"])
    assert stock["layout_copies_s"] > 0 and tides["layout_copies_s"] == 0
    # Over a rail: of each gathered byte 3 in 4 nodes' shares, an eighth a rail; of a reduce twice
    # that, in fp32. Blocks are gathered twice, the root once.
    model = models.find("llama-8b")
    gathered = sum(2 * g.numel * g.count * (1 if g.is_root else 2) for g in model.groups)
    reduced = sum(4 * g.numel * g.count for g in model.groups)
    expected = (gathered + reduced) * 3 / 4 / 8
    assert tides["rail_bytes"] == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("cluster", list(clusters.BUILT_IN))
def test_every_cluster_that_is_built_in(tide: Tide, cluster: str) -> None:
    told = spoken(
        tide("simulate", "--cluster", cluster, "--gpus", "64", "--model", "llama-8b", "--json")
    )
    names = [one["system"] for one in told["systems"]]
    assert names[0] == "stock" and "tide" in names
    assert ("symmem" in names) == clusters.find(cluster).multicast
    for one in told["systems"]:
        assert one["step_s"] > one["computing_s"] > 0
        assert one["memory_bytes"] > 0


def test_four_thousand_gpus_are_one_node(tide: Tide) -> None:
    told = spoken(tide("simulate", "--gpus", "4096", "--model", "qwen3-30b-a3b", "--json"))
    assert told["nodes"] == 512
    assert {one["system"] for one in told["systems"]} >= {"stock", "symmem", "tide"}


def test_a_picture_needs_no_display(tide: Tide, tmp_path: Path) -> None:
    told = tide("simulate", "--gpus", "8", "--model", "llama-8b", "--out", "step.png", DISPLAY="")
    assert told.returncode == 0, told.stderr
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_constants_say_where_they_are_from(tide: Tide) -> None:
    said = tide("simulate", "--constants").stdout
    for word in ("push_rate", "H200 pair", "assumed", "the paper"):
        assert word in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--cluster", "moon"), ("moon", "dgx-h200")),
        (("--cluster", "none.yaml"), ("none.yaml", "cannot be read")),
        (("--gpus", "12"), ("12", "multiple")),
        (("--gpus", "1"), ("from 2",)),
        (("--gpus", "1000000"), ("16384",)),
        (("--gpus", "many"), ("many",)),
        (("--tokens", "0"), ("--tokens",)),
        (("--model", "gpt"), ("gpt", "llama-8b")),
        (("--model", "nowhere:build"), ("nowhere",)),
        (("--model", "json:nothing"), ("nothing",)),
        (("--model", "json:dumps"), ("TypeError",)),
        (("--model", "json:JSONEncoder"), ("JSONEncoder", "nn.Module")),
        (("--model", "none.py:build"), ("none.py",)),
        (("--out", "no/such/folder.png"), ("no/such",)),
        (("--schedule", "best-of-all"), ("best-of-all",)),
    ],
)
def test_bad_input_is_one_sentence(
    tide: Tide, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    one_sentence(tide("simulate", *arguments), *words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", ("mapping",)),
        ("rail: fast", ("rail is a number", "fast")),
        ("rial: 5e9", ("no 'rial'", "rail")),
        ("gpus_per_node: 0", ("at least 1",)),
        ("gpus_per_node: 2.5", ("gpus_per_node", "2.5")),
        ("multicast: 1", ("multicast", "bool")),
        ("base: moon", ("base is one of",)),
        ("hbm: .nan", ("hbm",)),
        ("overrides: {push_rtae: 1e9}", ("push_rtae",)),
        ("overrides: {push_rate: -1}", ("push_rate",)),
        ("a: b: c", ("no YAML",)),
        ("", ("mapping",)),
    ],
)
def test_a_bad_cluster_is_one_sentence(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(BadInput) as caught:
        clusters.find(str(file))
    for word in (*words, "mine.yaml"):
        assert word in str(caught.value)


def test_a_described_cluster(tide: Tide, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "base: no-multicast\ngpu: H800\ngpus_per_node: 4\nlink: 160e9\nrail: 25e9\n"
        "overrides: {kernel_start_s: 5e-6}\n"
    )
    slow = spoken(
        tide("simulate", "--cluster", "mine.yaml", "--gpus", "16", "--model", "llama-8b", "--json")
    )
    assert slow["cluster"] == "mine" and slow["gpu"] == "H800" and slow["nodes"] == 4
    block = slow["systems"][1]["groups"][1]
    shard = 2 * models.find("llama-8b").largest.numel / 16
    assert block["gather_s"] > 3 * shard / 25e9  # three shards over one rail
    assert block["gather_s"] < 1.1 * 15 * shard / 25e9


def test_a_model_of_ones_own(tide: Tide, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    block = lambda: nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512))\n"
        "    blocks = nn.ModuleList(block() for _ in range(6))\n"
        "    return nn.Sequential(nn.Embedding(1000, 512), blocks)\n"
    )
    told = spoken(tide("simulate", "--model", "mine:build", "--gpus", "8", "--json"))
    by_path = spoken(tide("simulate", "--model", "./mine.py:build", "--gpus", "8", "--json"))
    assert by_path["systems"] == told["systems"]
    block = 512 * 2048 * 2 + 2048 + 512
    assert told["parameters"] == 6 * block + 1000 * 512


def test_a_broken_script_is_one_sentence(tide: Tide, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("def build(:\n")
    one_sentence(tide("simulate", "--model", "broken:build"), "broken:build", "SyntaxError")
    (tmp_path / "leaves.py").write_text("raise SystemExit('not today')\n")
    one_sentence(tide("simulate", "--model", "leaves.py:build"), "SystemExit", "not today")


def test_interrupted_it_ends(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tide.cli", "simulate", "--gpus", "512"]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        time.sleep(2.5)
        os.kill(child.pid, signal.SIGINT)
        said, complained = child.communicate(timeout=60)
    assert child.returncode == 130, (said, complained)
    assert "interrupted" in complained and "Traceback" not in complained
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)


# Models and memory.


def test_models_have_the_public_sizes() -> None:
    for name, billions, active in (
        ("llama-8b", 8.03, 7.5),  # public: 8.03 and 70.55
        ("llama-70b", 70.55, 69.5),
        ("qwen3-30b-a3b", 30.53, 3.0),  # public: 30.5, 3.3 active with the embedding
        ("wan-14b", 14.3, 14.2),
    ):
        model = models.find(name)
        assert model.numel / 1e9 == pytest.approx(billions, rel=0.01), name
        assert model.active / 1e9 == pytest.approx(active, rel=0.03), name


def test_memory_of_stock_is_its_tensors() -> None:
    # A root of 2 x R bytes; of a block the parameters twice, gradients, packed in fp32: 5 P.
    model = models.Model("two", (Group("root", (1 << 20,), is_root=True), BLOCK))
    used = memory.communication_bytes("stock", place(1), model)
    assert used == 2 * (1 << 20) + 5 * 2 * BLOCK.numel


# A step in virtual time.


def collective(alone: float, **more: Any) -> Collective:
    return Collective(alone, more.pop("beside_s", alone), **more)


def test_streams_run_beside_each_other() -> None:
    computing = Task(COMPUTE, "forward", 3.0)
    gather = Task(GATHER, "gather", 2.0, collective=collective(2.0))
    after = Task(COMPUTE, "forward", 1.0, [gather])
    assert step.play(place(1), [computing, gather, after]) == pytest.approx(4.0)
    assert gather.end_s == pytest.approx(2.0)


def test_a_gather_and_a_reduce_share_the_wires() -> None:
    gather = Task(GATHER, "gather", 1.0, collective=collective(1.0))
    reduce = Task(REDUCE, "reduce", 2.0, collective=collective(2.0))
    assert step.play(place(1), [gather, reduce]) == pytest.approx(3.0)
    assert gather.end_s == pytest.approx(2.0)  # at half speed


def test_a_collective_beside_products_takes_its_time_there() -> None:
    gather = Task(GATHER, "gather", 1.0, collective=collective(1.0, beside_s=4.0))
    computing = Task(COMPUTE, "forward", 2.0)
    # Half of it beside computing, the other half alone.
    assert step.play(place(1), [gather, computing]) == pytest.approx(2.5)


def test_a_gather_begins_with_the_computing_before_it() -> None:
    first = Task(COMPUTE, "forward", 1.0, [])
    blocker = Task(COMPUTE, "forward", 1.0)
    gather = Task(GATHER, "gather", 0.5, begins_with=blocker, collective=collective(0.5))
    step.play(place(1), [first, blocker, gather])
    assert gather.begin_s == pytest.approx(1.0)


def test_fsdp2s_order_of_a_step() -> None:
    cost = systems.GroupCost(collective(1.0), collective(2.0), 0.1, 0.2, 0.3)
    model = models.Model("two", (Group("root", (8,), is_root=True), Group("block", (8,), 2)))
    tasks = step.Builder(model, [cost, cost], [1.0, 1.0]).build(2.0, 0.5)
    assert [t.name for t in tasks if t.stream == GATHER] == [
        "gather"
    ] * 5  # root once, blocks twice
    assert [t.name for t in tasks if t.stream == REDUCE] == ["reduce"] * 3
    named = [t.name for t in tasks if t.stream == COMPUTE]
    assert named.count("copy-out") == 5 and named.count("pack") == 3
    assert named[-1] == "optimizer" and named.count("forward") == named.count("backward") == 3
    step.play(place(1), tasks)
    packs = [t for t in tasks if t.name == "pack"]
    reduces = [t for t in tasks if t.name == "reduce"]
    for later, earlier in zip(packs[1:], reduces, strict=False):
        assert later.begin_s >= earlier.end_s  # one buffer
    assert tasks[-1].begin_s >= reduces[-1].end_s


# Collectives.


@pytest.mark.parametrize("nodes", [8, 16, 32, 64])
def test_one_node_stands_for_all(nodes: int) -> None:
    where = place(nodes)
    for call in (where.gather_call(BLOCK, "doubling"), where.reduce_call(BLOCK)):
        every = where.simulate([call], one_node=False)
        one = where.simulate([call], one_node=True)
        assert len(one.ranks) == 8 and len(every.ranks) == 8 * nodes
        assert one.end_s[0] == pytest.approx(every.end_s[0], rel=0.01)
        assert one.ranks[0].sm_s == pytest.approx(every.ranks[0].sm_s, rel=0.01)


def test_the_work_of_a_uniform_cluster_grows_with_its_rounds_only() -> None:
    few, many = (
        place(nodes).simulate([place(nodes).gather_call(BLOCK, "doubling")], one_node=True)
        for nodes in (128, 512)
    )
    assert many.events < 1.5 * few.events  # 9 rounds against 7


def test_best_is_the_fastest_schedule() -> None:
    small = Group("small", (1 << 20,))
    where = place(16, 1)
    alone = {
        name: systems.simulated_alone(where, small, name).end_s[0] for name in systems.SCHEDULES
    }
    found = systems.tide_gather(where, small)
    assert alone[found.schedule] == pytest.approx(min(alone.values()), rel=1e-3)


# The paper.


def test_each_row_is_close_or_says_why() -> None:
    rows = paper.rows()
    assert len(rows) >= 30
    for row in rows:
        assert row.is_close or row.why, row
    assert sum(row.is_close for row in rows) >= 13


def test_the_papers_numbers_are_said_to_be_measured(tide: Tide) -> None:
    said = tide("simulate", "--paper").stdout
    assert "paper (measured)" in said and "simulated" in said and "Assumed" in said
    assert max(map(len, said.splitlines())) <= 100
    told = spoken(tide("simulate", "--paper", "--json"))
    assert told["paper"] == "measured" and told["predicted"] == "simulated" and told["assumed"]


def test_a_question_without_a_switch_leaves_symmem_out() -> None:
    question = run.Question(
        clusters.find("no-multicast"), 2, 8, models.find("llama-8b"), 4096, 4096
    )
    assert "symmem" not in [one.system for one in run.answers(question)]
