"""`tide doctor`: what it finds is what the system says, each obstacle closes its path and no other,
and ranks that differ are named."""

from __future__ import annotations

import copy
import json
import os
import platform
import socket
import sys
from typing import Any

import pytest
import torch
from tide import knobs
from tide.doctor import launches, paths

GPU = {
    "name": "a GPU",
    "virtual memory": 1,
    "handles by descriptor": 1,
    "dma-buf": 1,
    "multicast": 1,
}
GOOD: dict[str, Any] = {
    "versions": {"tide extension": "built for torch 2.15", "cuda driver": "13.2", "ucx": "1.22.0"},
    "host": {
        "shared memory by descriptor": True,
        "open files": 4096,
        "memlock": "unlimited",
    },
    "gpus": {
        "devices": [GPU, GPU, GPU],
        "peer access": [[1, 1, 1], [1, 1, 1], [1, 1, 1]],
        "nvlinks": [18, 18, 18],
    },
    "network": {
        "rdma ports": [{"device": "mlx5_0:1", "state": "ACTIVE"}],
        "nvidia_peermem": False,
    },
    "environment": {},
    "knobs": {"TIDE_FSDP": "both", "TIDE_MULTICAST": "auto"},
}
ALL = paths.Build(devices=("cpu", "cuda"), hosts=("cpu", "cuda"), multicast=True)


def changed(path: str, value: Any) -> dict[str, Any]:
    facts = copy.deepcopy(GOOD)
    section, name = path.split("/")
    facts[section][name] = value
    return facts


def taken(facts: dict[str, Any]) -> list[str]:
    steps = paths.ladders(facts, ALL)
    return [rung.path if (rung := step.taken) else "" for step in steps]


def test_a_machine_with_everything_takes_the_best_paths() -> None:
    for step in paths.ladders(GOOD, ALL):
        assert step.taken is step.rungs[0]
        assert step.better == []


@pytest.mark.parametrize(
    ("path", "value", "ladder", "rung"),
    [
        ("versions/tide extension", "unusable: built for torch 2.14", 0, 1),
        ("knobs/TIDE_FSDP", "0", 0, 1),
        ("host/open files", 64, 0, 1),
        ("gpus/devices", [GPU, GPU, {**GPU, "multicast": 0}], 1, 1),
        ("gpus/devices", [GPU, GPU], 1, 1),
        ("environment/NCCL_NVLS_ENABLE", "0", 1, 1),
        ("environment/TORCH_SYMM_MEM_DISABLE_MULTICAST", "1", 1, 1),
        ("environment/NVSHMEM_DISABLE_NVLS", "1", 1, 1),
        ("knobs/TIDE_MULTICAST", "0", 1, 1),
        ("gpus/nvlinks", [0, 0], 1, 2),
        ("gpus/nvlinks", None, 1, 2),
        ("gpus/peer access", [[1, 0], [1, 1]], 1, 3),
        ("environment/CUDA_DEVICE_MAX_CONNECTIONS", "1", 1, 3),
        ("versions/cuda driver", "12.8", 1, 3),
        ("network/rdma ports", [], 2, 1),
        ("network/rdma ports", [{"device": "mlx5_0:1", "state": "DOWN"}], 2, 1),
        ("host/memlock", 8 << 20, 2, 1),
        ("versions/ucx", None, 2, 2),
        ("network/rdma ports", [], 3, 2),
        ("host/memlock", 8 << 20, 3, 2),
        ("versions/ucx", None, 3, 3),
    ],
)
def test_each_obstacle_closes_the_paths_that_need_it(
    path: str, value: Any, ladder: int, rung: int
) -> None:
    facts = changed(path, value)
    step = paths.ladders(facts, ALL)[ladder]
    assert step.taken is step.rungs[rung]
    for closed in step.better:
        assert all(obstacle.why and obstacle.change for obstacle in closed.obstacles)
        assert closed.obstacles
    if path in ("versions/tide extension", "knobs/TIDE_FSDP"):
        assert all(name.startswith("stock") for name in taken(facts))
    else:
        # What closes one kind of traffic leaves the others alone.
        alike = {ladder} if ladder < 2 else {2, 3}  # between hosts both kinds need the same
        others = [other for at, other in enumerate(taken(facts)) if at not in alike]
        assert others == [other for at, other in enumerate(taken(GOOD)) if at not in alike]


def test_a_build_for_cpus_says_so() -> None:
    step = paths.ladders(GOOD, paths.Build(("cpu",), hosts=(), multicast=False))[1]
    assert step.taken is step.rungs[-1]
    assert all("serves cpu tensors only" in rung.obstacles[0].why for rung in step.better)


def test_a_build_that_moves_no_gpu_memory_between_hosts_says_so() -> None:
    cpu, gpu = paths.ladders(GOOD, paths.Build(("cpu", "cuda"), ("cpu",), multicast=True))[2:]
    assert cpu.taken is cpu.rungs[0]
    assert gpu.taken is gpu.rungs[-1]
    assert all("no CUDA tensors between hosts" in rung.obstacles[0].why for rung in gpu.better)


def test_a_build_without_multicast_copies_to_each_peer() -> None:
    step = paths.ladders(
        GOOD, paths.Build(("cpu", "cuda"), hosts=("cpu", "cuda"), multicast=False)
    )[1]
    assert step.taken is step.rungs[1]
    assert [obstacle.why for obstacle in step.rungs[0].obstacles] == [
        "this build of tide copies to each peer in turn"
    ]


def test_ranks_that_differ_are_named() -> None:
    facts = [{"versions": {"torch": v}, "host": {"name": "a", "boot": "x"}} for v in "1121"]
    assert launches.differences([*facts, None]) == [
        "rank 4 sent nothing: not started, or stuck before it",
        "versions.torch: 1 on ranks 0-1, 3; 2 on rank 2",
    ]


def test_hosts_with_unequal_numbers_of_ranks() -> None:
    facts = [{"host": {"name": name, "boot": name}} for name in "aab"]
    (sentence,) = launches.differences(list(facts))
    assert "a has 2, b has 1" in sentence


def test_doctor_alone(tide) -> None:
    done = tide("doctor", "--json", TIDE_FSDP="gather", TIDE_FSPD="both")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found["facts"]["versions"]["torch"] == torch.__version__
    assert found["facts"]["versions"]["kernel"] == platform.release()
    assert found["facts"]["host"]["cores"] == len(os.sched_getaffinity(0))
    by_name = {knob["name"]: knob for knob in found["knobs"]}
    assert set(knobs.KNOBS) < set(by_name)
    assert (by_name["TIDE_FSDP"]["value"], by_name["TIDE_FSDP"]["origin"]) == (
        "gather",
        "environment",
    )
    assert by_name["TIDE_FSDP"]["default"] == "both"
    assert by_name["TIDE_FSPD"]["problem"] == "not a knob of tide; did you mean TIDE_FSDP?"
    assert found["paths"][0]["taken"].startswith("tide")
    assert max(map(len, tide("doctor").stdout.splitlines())) <= 100


def test_a_knob_closes_a_path(tide) -> None:
    """The environment reaches the judgement."""
    (first, *_) = json.loads(tide("doctor", "--json", TIDE_FSDP="0").stdout)["paths"]
    assert first["taken"].startswith("stock")
    assert "TIDE_FSDP=0" in first["better"][0]["obstacles"][0]["why"]


def test_doctor_under_torchrun(torchrun) -> None:
    program = f"""
if [ "$RANK" = 1 ]; then export TIDE_FSDP=gather; fi
exec {sys.executable} -m tide.cli doctor --json
"""
    done = torchrun(2, "--no-python", "bash", "-c", program, seconds=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["differences"] == ["knobs.TIDE_FSDP: both on rank 0; gather on rank 1"]


def test_a_rank_that_never_comes_is_named(tide) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    launch = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    done = tide("doctor", "--json", "--timeout", "1", **launch)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["differences"] == [
        "ranks 1-2 sent nothing: not started, or stuck before it"
    ]


@pytest.mark.parametrize(
    ("launch", "said"),
    [
        ({"RANK": "1"}, "do not say where"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "soon"}, "do not say where"),
        ({"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "99999"}, "do not say where"),
        ({"RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "out of reach"),
    ],
)
def test_a_launch_without_a_store(tide, launch: dict[str, str], said: str) -> None:
    done = tide("doctor", "--timeout", "1", WORLD_SIZE="2", **launch)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("tide: ") and said in done.stderr
    assert "Traceback" not in done.stderr
