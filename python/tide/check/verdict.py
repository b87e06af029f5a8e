"""What tide would make of the groups under a root that reached its first forward on the stage: the
real planning, with a backend that has no peers."""

from __future__ import annotations

from typing import Any

import torch

from tide import options
from tide.fsdp import backends, eligibility, plan, probes
from tide.fsdp.report import report

Json = dict[str, Any]


def judge(root: Any) -> Json:
    """The report's rows, and the memory of the root's arenas, of one rank."""
    made: dict[str, backends.DryBackend] = {}

    def find(group: Any, device: torch.device) -> Any:
        if device.type not in eligibility.SERVED_DEVICES:
            return None
        name = group.group_name
        if name not in made:
            wanted = options.completed(None, options.Options()._timeout)
            made[name] = backends.DryBackend(wanted, group.size())
        return made[name]

    def agree(candidates: list[Any]) -> None:
        """Every replica asks for the same."""

    # This process ends after the answer: nothing has to be put back.
    backends.find = find
    plan._agree_across_replicas = agree
    modules = probes.load()
    refusal = probes.refusal(modules)
    if refusal:
        return {"failure": f"this torch cannot be served: {refusal}"}
    plan.plan_root(root, modules)
    model = root._modules[0]
    found = report(model)
    return {
        "groups": [
            {**row, "reason": without_rank(row["reason"])} for row in found.to_dict()["rows"]
        ],
        "arena_bytes": found.arena_bytes,
        "rings": [
            {
                "process_group": name,
                "prefetch_depth": backend.depth,
                "slots": sum(one.shared_slots for one in backend.plans),
                "slot_bytes": max(one.shared_slot_bytes for one in backend.plans),
            }
            for name, backend in made.items()
            if backend.plans
        ],
        **stock_memory(model),
        "torch": torch.__version__,
    }


def without_rank(reason: str) -> str:
    """On the stage every rank says the same, so no rank need be named."""
    return reason.removeprefix("rank 0: ")


def stock_memory(model: torch.nn.Module) -> Json:
    """Parameters in all, and the buffers that stock communication needs beside the unsharded
    parameters: gathers of two groups, and one reduce in the reduction's dtype."""
    from tide.fsdp.report import _groups

    gathers, reduces, parameters = [0], [0], 0
    for group in _groups(model):
        shard_group = getattr(group.mesh_info, "shard_process_group", None)
        ranks = shard_group.size() if shard_group is not None else 1
        numel = sum(p._sharded_param_data.numel() for p in group.fsdp_params) * ranks
        parameters += sum(p._orig_size.numel() for p in group.fsdp_params)
        dtype = group.fsdp_params[0].param_dtype or group.fsdp_params[0].orig_dtype
        gathers.append(numel * dtype.itemsize)
        reduces.append(numel * (group._reduce_dtype or dtype).itemsize)
    gathers.sort()
    return {
        "parameters": parameters,
        "stock_buffer_bytes": gathers[-1] + (gathers[-2] if len(gathers) > 2 else 0) + max(reduces),
    }
