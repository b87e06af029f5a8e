"""Groups on several nodes: TIDE_NODE_SIZE cuts one host's ranks, UCX over the loopback joins
them."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import tide
import torch
import torch.distributed as dist
from c10d_faults_test import gather, quiet_end, rank_numbers
from harness import all_gather_list, reduce_scatter_list, run_ranks
from node_order import order_of_sums, sum_in_order
from tide.ucx_package import packaged_ucx
from torch.distributed import ReduceOp

SHAPES = [(2, 1), (3, 1), (2, 2), (4, 1), (3, 2), (5, 1), (4, 2)]
"""(nodes, ranks of each)"""
NUMELS = (5, 40_000, 0, 1, 130_007)

pytestmark = pytest.mark.skipif(
    not packaged_ucx() and not Path("/usr/lib/x86_64-linux-gnu/libucp.so.0").exists(),
    reason="no UCX on this machine (pip install libucx-cu13)",
)


def cut(node_size: int, **fields: Any) -> Any:
    return lambda: tide.Options(node_size=node_size, **fields)


def numbers(rank: int, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(numel, generator=generator)


def gathers_are_exact(rank: int, size: int) -> None:
    for seed, dtype in enumerate((torch.bfloat16, torch.float32, torch.int64)):
        shards = [numbers(rank, n, seed).mul(100).to(dtype) for n in NUMELS]
        outputs = [torch.zeros(n * size, dtype=dtype) for n in NUMELS]
        all_gather_list(outputs, shards).wait()
        for output, numel in zip(outputs, NUMELS, strict=True):
            parts = [numbers(peer, numel, seed).mul(100).to(dtype) for peer in range(size)]
            assert torch.equal(output, torch.cat(parts))


def sums_are_exact(rank: int, size: int, node_size: int) -> None:
    """Of the same bits as fp32 sums in the nodes' order."""
    order = order_of_sums(dist.group.WORLD, node_size)
    for seed, (dtype, op) in enumerate(
        [(torch.bfloat16, ReduceOp.SUM), (torch.bfloat16, ReduceOp.AVG), (torch.float32, None)]
    ):
        inputs = [numbers(rank, n * size, seed).to(dtype) for n in NUMELS]
        outputs = [torch.zeros(n, dtype=dtype) for n in NUMELS]
        reduce_scatter_list(outputs, inputs, op).wait()
        for output, numel in zip(outputs, NUMELS, strict=True):
            mine = slice(rank * numel, (rank + 1) * numel)
            parts = [numbers(p, numel * size, seed).to(dtype)[mine].float() for p in range(size)]
            total = sum_in_order(parts, order) * (1 / size if op == ReduceOp.AVG else 1)
            assert torch.equal(output, total.to(dtype)), (dtype, op, numel)


@pytest.mark.parametrize(("nodes", "locals_"), SHAPES)
def test_lists_between_nodes(nodes: int, locals_: int) -> None:
    def body(rank: int, size: int) -> dict[str, str]:
        for _ in range(2):
            gathers_are_exact(rank, size)
            sums_are_exact(rank, size, locals_)
        # Every byte once: over the rail comes what M - 1 other nodes hold, or half of it twice.
        assert tide.of().counters()["bytes_sent"] > 0
        return tide.of().why_delegated()

    assert run_ranks(nodes * locals_, body, options=cut(locals_)) == [{}] * (nodes * locals_)


@pytest.mark.parametrize("schedule", ["doubling", "ring", "direct"])
@pytest.mark.parametrize("pacing", ["confirm_head", "confirm_whole", "grant", "off"])
def test_every_schedule_and_pacing(schedule: str, pacing: str) -> None:
    def body(rank: int, size: int) -> None:
        for _ in range(3):
            gathers_are_exact(rank, size)

    fields = {"schedule": schedule, "pacing": pacing, "head_bytes": 4096}
    run_ranks(5, body, options=cut(1, **fields))


def test_layouts_and_registered_lists() -> None:
    def body(rank: int, size: int) -> None:
        shards = [numbers(rank, 6 * 4, 1).view(6, 4), numbers(rank, 10, 2)]
        layout = tide.GroupLayout.of([(6, 4 * size), (10 * size,)], [1, 0])
        outputs = [tide.empty(6, 4 * size), tide.empty(10 * size)]
        layout.all_gather(outputs, shards)
        assert torch.equal(
            outputs[0], torch.cat([numbers(p, 24, 1).view(6, 4) for p in range(size)], 1)
        )
        assert torch.equal(outputs[1], torch.cat([numbers(p, 10, 2) for p in range(size)]))

    run_ranks(4, body, options=cut(2))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"rails": "nosuch7"}, ["rank 3", "TIDE_RAILS names nosuch7"]),
        ({"ucx_library": "/nosuch/libucp.so.0"}, ["no UCX library here", "TIDE_UCX_LIBRARY"]),
    ],
)
def test_a_rank_without_a_rail_refuses_for_all(fields: dict[str, str], words: list[str]) -> None:
    def body(rank: int, size: int) -> str:
        own = fields if rank == 3 else {}
        group = dist.new_group(backend="tide", pg_options=tide.Options(node_size=2, **own))
        assert gather(group) == rank_numbers(size)
        return tide.of(group).why_delegated()["all_gather_into_tensor_coalesced"]

    reasons = run_ranks(4, body)
    assert len(set(reasons)) == 1, reasons
    assert all(word in reasons[0] for word in words), reasons[0]


def test_groups_of_one_node_need_no_network() -> None:
    def body(rank: int, size: int) -> None:
        pairs = [dist.new_group([0, 1], backend="tide"), dist.new_group([2, 3], backend="tide")]
        across = [dist.new_group([0, 2], backend="tide"), dist.new_group([1, 3], backend="tide")]
        assert gather(pairs[rank // 2]) == rank_numbers(2)
        assert tide.of(pairs[rank // 2]).counters()["bytes_sent"] == 0
        assert gather(across[rank % 2]) == rank_numbers(2)
        assert tide.of(across[rank % 2]).counters()["bytes_sent"] > 0

    run_ranks(4, body, environment={"TIDE_NODE_SIZE": "2"})


@pytest.mark.parametrize("node_size", [1, 2])
def test_a_killed_rank_is_noticed_on_every_node(node_size: int) -> None:
    def body(rank: int, size: int) -> str:
        gather()
        if rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        with pytest.raises(dist.DistBackendError) as caught:
            while True:
                gather()
        return str(caught.value)

    messages = run_ranks(
        4,
        lambda rank, size: quiet_end(body, rank, size),
        options=cut(node_size),
        group_timeout=600,
        dies={3: signal.SIGKILL},
    )
    for message in messages[:3]:
        assert "group '0'" in message and "rank 3" in message, messages


def test_a_rank_that_skips_a_call_is_named_on_every_node() -> None:
    def body(rank: int, size: int) -> str:
        gather()
        try:
            if rank != 2:
                gather()
            reduce_scatter_list([torch.zeros(3)], [torch.ones(3 * size)]).wait()
            gather()
        except dist.DistBackendError as error:
            return str(error)
        return "no error"

    messages = run_ranks(
        4, lambda rank, size: quiet_end(body, rank, size), options=cut(2), group_timeout=20
    )
    for message in messages:
        assert "group '0'" in message and re.search("gather|reduce", message), messages


def test_groups_end_and_new_ones_come_up() -> None:
    def body(rank: int, size: int) -> int:
        gather()
        for _ in range(3):
            group = dist.new_group(backend="tide", pg_options=tide.Options(node_size=2))
            assert gather(group) == rank_numbers(size)
            dist.destroy_process_group(group)
        return sum("tide" in name for name in thread_names())

    before_and_after = run_ranks(4, body, options=cut(2))
    assert all(threads == before_and_after[0] for threads in before_and_after)


def thread_names() -> list[str]:
    return [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
