"""In which order a group's gradients are added where its ranks stand on several nodes."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist


def order_of_sums(group: dist.ProcessGroup, node_size: int | None = None) -> list[list[int]]:
    """The group's ranks by node, in the order in which the nodes' sums are added on this rank: the
    own node's first, then those before it, cyclically. node_size: TIDE_NODE_SIZE without it."""
    members = dist.get_process_group_ranks(group)
    size = node_size if node_size is not None else int(os.environ.get("TIDE_NODE_SIZE", "0"))
    nodes: dict[int, list[int]] = {}
    for rank, member in enumerate(members):
        nodes.setdefault(member // size if size else 0, []).append(rank)
    own = list(nodes).index(members[group.rank()] // size if size else 0)
    everyone = list(nodes.values())
    return [everyone[own - back] for back in range(len(everyone))]


def sum_in_order(parts: list[torch.Tensor], order: list[list[int]]) -> torch.Tensor:
    """Each node's parts one after another, then the nodes' sums, in the parts' dtype."""
    total = None
    for node in order:
        partial = torch.zeros_like(parts[0])
        for rank in node:
            partial += parts[rank]
        total = partial if total is None else total + partial
    assert total is not None
    return total
