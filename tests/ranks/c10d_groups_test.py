"""Groups, meshes, options and lifetimes of the tide backend, on CPU."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, init_group, open_store, run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

MINOR = int(torch.__version__.split(".")[1])
NEW_ENTRY_POINT = MINOR >= 14  # c10d looks backends up by itself; before, `import torch` does
SPLITS_WITHOUT_DEVICE = hasattr(dist.distributed_c10d, "_get_backend_name_for_device")


def check_sum(group: dist.ProcessGroup | None, members: int) -> None:
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [float(members)] * 3


def test_found_without_an_import() -> None:
    # A fresh interpreter, nothing imports tide: by c10d's entry point alone, and with autoload.
    program = """
import sys, torch, torch.distributed as dist
dist.init_process_group("tide", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert dist.get_backend() == "tide", dist.get_backend()
assert tensor.tolist() == [1.0] * 3
dist.destroy_process_group()
print("served")
"""
    for autoload in ("0", "1") if NEW_ENTRY_POINT else ("1",):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "served"


def test_a_script_may_end_without_destroying_its_group() -> None:
    program = """
import torch, torch.distributed as dist
dist.init_process_group("tide", store=dist.HashStore(), rank=0, world_size=1)
layout = __import__("tide").GroupLayout((1,))
kept = layout.all_gather([torch.zeros(3)], [torch.ones(3)], async_op=True)
layout.all_gather([torch.zeros(3)], [torch.ones(3)], async_op=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('tide')\n"
        "tensor = torch.ones(1)\n"
        "dist.all_reduce(tensor)\n"
        "assert tensor.item() == dist.get_world_size() == 2\n"
        "dist.destroy_process_group()\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node=2",
            "--master-port=0",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=127.0.0.1:0",
            str(script),
        ],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_one_rank() -> None:
    def body(rank: int, size: int) -> None:
        check_sum(None, 1)
        output = torch.zeros(3)
        dist.all_gather_into_tensor(output, torch.ones(3))
        assert output.tolist() == [1.0] * 3

    run_ranks(1, body)


def test_subgroups() -> None:
    def body(rank: int, size: int) -> None:
        assert dist.get_backend() == "tide"
        first, second = dist.new_group([0, 1]), dist.new_group([2, 3])
        mine = first if rank < 2 else second
        check_sum(mine, 2)
        assert tide.of(mine) is not None
        assert tide.of(mine).options.global_ranks_in_group == ([0, 1] if rank < 2 else [2, 3])
        mixed = dist.new_group(backend="gloo")
        check_sum(mixed, 4)
        assert tide.of(mixed) is None
        lone = [dist.new_group([peer], backend="tide") for peer in range(size)]
        check_sum(lone[rank], 1)
        check_sum(None, 4)
        dist.destroy_process_group(mine)
        check_sum(None, 4)

    run_ranks(4, body)


def test_tide_group_in_a_gloo_program() -> None:
    def body(rank: int, size: int) -> None:
        group = dist.new_group(backend="tide")
        check_sum(group, size)
        check_sum(None, size)
        assert tide.of(group) is not None and tide.of(None) is None

    run_ranks(3, body, backend="gloo")


@pytest.mark.parametrize("backend", ["cpu:gloo,cuda:tide", "cpu:tide"])
def test_backend_by_device(backend: str) -> None:
    def body(rank: int, size: int) -> None:
        check_sum(None, size)
        assert (tide.of(None) is not None) == (backend == "cpu:tide")
        assert (tide.of(None, "cuda") is not None) == ("cuda:tide" in backend)

    run_ranks(2, body, backend=backend)


@pytest.mark.skipif(
    not SPLITS_WITHOUT_DEVICE, reason="this torch splits groups of a bound device only"
)
def test_split_group() -> None:
    def body(rank: int, size: int) -> None:
        halves = dist.split_group(split_ranks=[[0, 1], [3, 2]])
        check_sum(halves, 2)
        assert dist.get_rank(halves) == [0, 1, 1, 0][rank]
        backend = tide.of(halves)
        assert backend is not None and backend.size() == 2
        some = dist.split_group(split_ranks=[[1, 2, 3]], timeout=timedelta(seconds=20))
        if rank == 0:
            assert some == dist.GroupMember.NON_GROUP_MEMBER
        else:
            check_sum(some, 3)
            assert tide.of(some).options._timeout == timedelta(seconds=20)
        check_sum(None, 4)

    run_ranks(4, body)


def test_meshes() -> None:
    def body(rank: int, size: int) -> None:
        line = init_device_mesh("cpu", (size,))
        assert tide.of(line.get_group()) is tide.of(None)
        plane = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name in ("replicate", "shard"):
            group = plane[name].get_group()
            assert tide.of(group) is not None
            check_sum(group, 2)
        check_sum(plane._flatten("all").get_group(), 4)
        overridden = init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": "gloo"}
        )
        assert tide.of(overridden["a"].get_group()) is None
        assert tide.of(overridden["b"].get_group()) is not None
        with_options = init_device_mesh(
            "cpu",
            (2, 2),
            mesh_dim_names=("a", "b"),
            backend_override={"b": ("tide", tide.Options(memory_mode="slot_reuse"))},
        )
        assert tide.of(with_options["b"].get_group()).options.memory_mode == "slot_reuse"

        whole = torch.arange(24.0).reshape(6, 4)
        sharded = distribute_tensor(whole, line, [Shard(0)])
        assert isinstance(sharded, DTensor)
        assert torch.equal(sharded.full_tensor(), whole)
        assert torch.equal(sharded.redistribute(line, [Shard(1)]).full_tensor(), whole)
        assert torch.equal(distribute_tensor(whole, line, [Replicate()]).to_local(), whole)

    run_ranks(4, body)


def test_data_parallel() -> None:
    def body(rank: int, size: int) -> torch.Tensor:
        torch.manual_seed(1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 3))
        model(torch.full((2, 4), float(rank + 1))).sum().backward()
        return model.module.weight.grad

    results = run_ranks(2, body)
    # Two rows of the input's value on each rank, averaged over ranks: 2 * (1 + 2) / 2.
    for result in results:
        assert torch.equal(result, torch.full((3, 4), 3.0))


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_three_lives_on_one_store(kind: str) -> None:
    def body(rank: int, size: int) -> None:
        store = open_store()
        for life in range(3):
            init_group(store=store)
            check_sum(None, size)
            pair = dist.new_group([0, 1])
            if rank < 2:
                check_sum(pair, 2)
            outputs = [torch.zeros(2 * size)]
            all_gather_list(outputs, [torch.full((2,), float(life))]).wait()
            assert outputs[0].tolist() == [float(life)] * (2 * size)
            dist.destroy_process_group()

    run_ranks(3, body, init=False, store=kind)


def test_many_groups_come_and_go() -> None:
    def body(rank: int, size: int) -> None:
        for _ in range(20):
            group = dist.new_group()
            check_sum(group, size)
            dist.destroy_process_group(group)
            del group
            gc.collect()
        check_sum(None, size)

    run_ranks(2, body, timeout=120)


def test_detail_debugging() -> None:
    def body(rank: int, size: int) -> None:
        assert (
            type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
            == "_ProcessGroupWrapper"
        )
        assert tide.of(None) is not None
        check_sum(None, size)
        output = torch.zeros(2 * size)
        dist.all_gather_into_tensor(output, torch.full((2,), float(rank)))
        assert output.tolist() == [float(peer) for peer in range(size) for _ in range(2)]
        check_sum(dist.new_group(), size)
        dist.barrier()

    run_ranks(2, body, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})


def test_inner_backends() -> None:
    def body(rank: int, size: int) -> None:
        inner = tide.inner(None, "cpu")
        assert inner.name() == "gloo"
        assert inner is tide.inner()
        backend = tide.of(None)
        assert backend.inner_if_made("cuda") is None
        gloo = dist.new_group(backend="gloo")
        with pytest.raises(ValueError, match="not served by tide"):
            tide.inner(gloo)

    run_ranks(2, body)


def test_options() -> None:
    def body(rank: int, size: int) -> None:
        options = tide.of(None).options
        assert type(options) is type(tide.Options())
        assert options._timeout == timedelta(seconds=30)
        assert options.memory_mode == "in_place"  # the knob says slot_reuse, the option comes first
        assert options.fsdp == "gather"  # the knob
        assert options.node_size == 0  # the default

    run_ranks(
        2,
        body,
        options=lambda: tide.Options(memory_mode="in_place"),
        environment={"TIDE_MEMORY_MODE": "slot_reuse", "TIDE_FSDP": "gather"},
    )


def test_wrong_options_are_refused() -> None:
    with pytest.raises(TypeError, match="no field 'memory'"):
        tide.Options(memory="x")
    with pytest.raises(ValueError, match="memory_mode must be one of"):
        tide.Options(memory_mode="x")

    def body(rank: int, size: int) -> str:
        with pytest.raises(ValueError, match=r"TIDE_FSDP must be one of: .* it is 'yes'"):
            init_group()
        return "refused"

    assert run_ranks(1, body, init=False, environment={"TIDE_FSDP": "yes"}) == ["refused"]


def test_wrong_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tide import _registration

    monkeypatch.setattr(torch, "__version__", "2.9.1+cpu")
    with pytest.raises(
        ImportError, match=r"built for torch 2\.\d+ and meets torch 2\.9.*pip install"
    ):
        _registration.register()


def test_timeout_reaches_the_inner_backend() -> None:
    def body(rank: int, size: int) -> None:
        group = dist.new_group(timeout=timedelta(seconds=17))
        assert tide.of(group).options._timeout == timedelta(seconds=17)
        assert tide.inner(group).options._timeout > timedelta(seconds=17)
        group.set_timeout(timedelta(seconds=11))
        assert tide.of(group).options._timeout == timedelta(seconds=11)

    run_ranks(2, body)


@pytest.mark.skipif(
    not hasattr(dist.distributed_c10d._DistributedBackendOptions, "process_group"),
    reason="this torch does not tell a backend which group it is for",
)
def test_another_custom_backend_beside_tide_is_refused() -> None:
    """c10d would serve both devices by the other one."""

    def body(rank: int, size: int) -> None:
        def other(options: Any, _: Any) -> Any:
            return dist.ProcessGroupGloo(
                options.store, options.group_rank, options.group_size, options.timeout
            )

        dist.Backend.register_backend("other", other, extended_api=True, devices=["cpu", "cuda"])
        with pytest.raises(ValueError, match="beside another custom backend"):
            init_group("cpu:other,cuda:tide")

    run_ranks(2, body, init=False)
