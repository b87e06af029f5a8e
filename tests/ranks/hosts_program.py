"""What hosts_test.py starts by torchrun on every host: a plain training program with checks."""

from __future__ import annotations

import json
import os

import tide
import torch
import torch.distributed as dist
from c10d_nodes_test import gathers_are_exact, sums_are_exact
from torch import nn
from torch.distributed.fsdp import fully_shard


def main() -> None:
    dist.init_process_group("tide")
    rank, size = dist.get_rank(), dist.get_world_size()
    gathers_are_exact(rank, size)
    sums_are_exact(rank, size, int(os.environ["LOCAL_WORLD_SIZE"]))

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(4)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(5):
        loss = model(torch.ones(4, 48)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True), losses
    report = tide.report(model)
    assert all(row.path == "tide" for row in report), report
    (nodes,) = report.nodes.values()
    print("TIDE", rank, json.dumps(nodes), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
