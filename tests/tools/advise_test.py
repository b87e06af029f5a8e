"""`tide advise` on small traces in torch.profiler's form, whose answer is arithmetic."""

from __future__ import annotations

import gzip
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tide.advise import estimate, measure, read, spans

STEP = 1000.0  # microseconds


def event(category: str, name: str, begin: float, length: float, **more: Any) -> dict[str, Any]:
    thread = more.pop("tid", 1)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": thread,
        "ts": begin,
        "dur": length,
        "args": more,
    }


def gpu_step(base: float, number: int) -> list[dict[str, Any]]:
    """One step: a gather half hidden under a product, its copy, the packing and a reduce."""
    first = number * 10
    return [
        event("user_annotation", f"ProfilerStep#{number}", base, STEP),
        event("user_annotation", "FSDP::all_gather (layers.0)", base, 60),
        event("cpu_op", "fsdp::all_gather_copy_in", base + 5, 20),
        event("cuda_runtime", "cudaLaunchKernel", base + 10, 5, correlation=first),
        event("kernel", "multi_tensor_apply_kernel", base + 20, 10, correlation=first, tid=7),
        event("cuda_runtime", "cudaLaunchKernelExC", base + 30, 5, correlation=first + 1),
        event(
            *("kernel", "ncclDevKernel_AllGather_RING_LL", base + 100, 200),
            correlation=first + 1,
            grid=[16, 1, 1],
            tid=9,
        ),
        event("kernel", "sm90_gemm", base + 100, 100, grid=[200, 1, 1], tid=7),
        event("kernel", "split_with_sizes_copy_out_kernel", base + 300, 30, tid=7),
        event("kernel", "chunk_cat_cuda_kernel", base + 400, 50, tid=7),
        event("kernel", "sm90_gemm", base + 410, 20, tid=7),
        event(
            *("kernel", "ncclDevKernel_ReduceScatter_Sum_f32", base + 500, 100),
            grid=[24, 1, 1],
            tid=9,
        ),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32", base + 700, 40, tid=9),
    ]


def trace(events: list[dict[str, Any]], **header: Any) -> str:
    top = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "numSms": 132}],
        "distributedInfo": {"backend": "nccl", "rank": 3, "world_size": 8},
        "traceEvents": events,
        "traceName": "x",
        **header,
    }
    return json.dumps(top, indent=1)


def gpu_trace() -> str:
    return trace(gpu_step(5e12, 1) + gpu_step(5e12 + STEP, 2))


@pytest.fixture
def measured(tmp_path: Path) -> measure.Measured:
    (tmp_path / "t.json").write_text(gpu_trace())
    result: measure.Measured = read(tmp_path / "t.json")
    return result


def near(value: float) -> Any:
    return pytest.approx(value * 1e-6, rel=2e-3)


def test_a_gpu_step_adds_up(measured: measure.Measured) -> None:
    assert (measured.rank, measured.ranks, measured.sms, measured.steps) == (3, 8, 132, 2)
    assert measured.step == near(STEP)
    assert {k: v * 1e6 for k, v in measured.copies.items()} == pytest.approx(
        {"copy in": 10, "copy out": 30, "chunk_cat": 50}, rel=2e-3
    )
    assert measured.exposed_copies == near(10 + 30 + 50 - 20)
    assert measured.resident["gather"] == near(200) and measured.exposed["gather"] == near(100)
    assert measured.resident["reduce"] == near(100) and measured.exposed["reduce"] == near(100)
    assert measured.sm_seconds["gather"] == near(16 * 200)
    assert measured.sm_seconds["reduce"] == near(24 * 100)
    # A third of the time that both are there lies beside a product.
    assert measured.contended == near((16 * 200 + 24 * 100) * 100 / 300)
    assert measured.modules["layers.0"]["copies"] == near(10)
    assert measured.modules["layers.0"]["exposed"] == near(100)


def test_the_estimate_follows_its_formula(measured: measure.Measured) -> None:
    won = estimate.gain(measured)
    contention = (16 * 200 + 24 * 100) / 3 / 132
    assert won.at_most == near(70 + 200 + contention)
    assert won.expected == near(70 + 0.36 * contention)
    assert estimate.verdict(measured, won, 0.03)[0] == "yes"
    assert estimate.verdict(measured, won, 0.2)[0] == "perhaps"
    assert estimate.verdict(measured, won, 0.5)[0] == "no"
    (sentence,) = estimate.not_served(measured)
    assert sentence.startswith("all-reduce: 4.0% of a step")


def test_shares_by_size() -> None:
    least, most = estimate.ratio_shares(70e9, 70e9, 32768)
    assert most == pytest.approx(0.031, rel=0.01) and least < most
    # A tenth of the parameters active: ten times the share.
    assert estimate.ratio_shares(30e9, 3e9, 32768)[1] == pytest.approx(10 * most)


def test_bare_lists_and_traces_without_fsdp(tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(json.dumps([event("kernel", "gemm", 0, 10)]))
    result = read(tmp_path / "t.json")
    assert result.step == near(10)
    assert estimate.verdict(result, estimate.gain(result), 0.03)[0] == "nothing"


def test_spans_against_a_grid() -> None:
    random.seed(3)
    for _ in range(200):
        sets = [
            [
                sorted((random.randint(0, 30), random.randint(0, 30)))
                for _ in range(random.randint(0, 6))
            ]
            for _ in range(2)
        ]
        a, b = (spans.union(one) for one in sets)
        cells = [{i for x, y in one for i in range(x, y)} for one in sets]
        assert spans.length(a) == len(cells[0])
        assert spans.length(spans.intersection(a, b)) == len(cells[0] & cells[1])
        assert spans.length(spans.difference(a, b)) == len(cells[0] - cells[1])


def test_innermost() -> None:
    nested = np.array([[0, 10], [2, 5], [20, 30]], dtype=float)
    times = np.array([1, 3, 5, 15, 25, 10], dtype=float)
    assert spans.innermost(nested, times).tolist() == [0, 1, 0, -1, 2, -1]


def test_cpu_traces_know_what_gloo_does(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "ProfilerStep#1", 0, 100),
        event("user_annotation", "FSDP::all_gather (a)", 0, 30),
        event("cpu_op", "fsdp::all_gather_copy_in", 1, 4),
        event("user_annotation", "gloo:all_gather", 6, 20, tid=2),
        event("user_annotation", "FSDP::post_backward_reduce (a)", 50, 40),
        event("cpu_op", "fsdp::chunk_cat", 51, 5),
        event("cpu_op", "aten::_chunk_cat", 52, 4),
        event("user_annotation", "gloo:all_reduce", 60, 20, tid=2),
        event("user_annotation", "gloo:all_reduce", 95, 5, tid=2),
    ]
    info = {"backend": "gloo", "rank": 0, "world_size": 2}
    (tmp_path / "t.json").write_text(trace(events, deviceProperties=[], distributedInfo=info))
    result = read(tmp_path / "t.json")
    micro = {k: round(v * 1e6, 6) for k, v in result.exposed.items()}
    assert micro == {"gather": 20, "reduce": 20, "all-reduce": 0}
    assert result.exposed_copies == near(4 + 5)
    assert estimate.gain(result).expected == near(9 + 20 / 2)
    assert math.isclose(result.modules["a"]["exposed"], 40e-6)


def test_the_verb(tide, tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"rank{rank}.json.gz").write_bytes(gzip.compress(gpu_trace().encode()))
    done = tide("advise", ".", "--out", "step.png", "--parameters", "70e9", "--tokens", "8192")
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 100
    assert "worth trying" in done.stdout and "by size" in done.stdout
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads(tide("advise", "rank0.json.gz", "--json").stdout)
    assert found["verdict"] == "yes" and len(found["ranks"]) == 1
    for wrong in (
        ["nofile"],
        ["rank0.json.gz", "--tokens", "5"],
        ["rank0.json.gz", "--out", "a/b.png"],
    ):
        assert tide("advise", *wrong).returncode == 2
