"""Why a parameter group goes stock, one sentence each.

Two kinds. What follows from the configuration that FSDP2 itself demands to be equal on all ranks
(the mesh, the backend) is decided without a vote. Everything else is this rank's own refusal, which
the vote carries to the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from tide.fsdp.probes import Torch

SERVED_DEVICES = ("cpu", "cuda")
SWITCHED_OFF = "TIDE_FSDP=0 leaves FSDP2 groups stock"


def group_name(group: Any) -> str:
    """The module's name inside the root, and which of the module's groups it is where there are
    several."""
    name = group._module_fqn or "root"
    if getattr(group, "_num_param_groups", 1) > 1:
        name += f" [{group._param_group_index}]"
    return name


def without_vote(group: Any) -> str:
    """Reasons that every rank sees alike."""
    if not isinstance(group.mesh_info, FSDPMeshInfo):
        return "its mesh only replicates, so there is nothing to gather or to scatter"
    if group.mesh_info.shard_process_group.size() == 1:
        return "its shard mesh has one rank, so there is nothing to gather or to scatter"
    if group.device.type not in SERVED_DEVICES:
        return f"its parameters are on {group.device.type}; tide serves {', '.join(SERVED_DEVICES)}"
    return ""


def not_on_tide(group: Any) -> str:
    name = process_group_name(group.mesh_info.shard_process_group)
    return f"its process group {name} does not run on tide for {group.device.type} tensors"


def gather_refusal(group: Any, modules: Torch, dry: bool = False) -> str:
    """This rank's reason against gathering the group; it goes into the vote. dry: nothing will be
    gathered, so shards may be on the meta device."""
    comm = group._all_gather_comm
    if type(comm) is not modules.collectives.DefaultAllGather:
        return f"a custom all-gather is set ({type(comm).__name__})"
    default = getattr(modules.collectives, "_default_all_gather_output_fn", None)
    if getattr(group, "_all_gather_output_fn", default) is not default:
        return "a function of its own lays this group's all-gather output out"
    for parameter in group.fsdp_params:
        reason = _parameter_refusal(parameter, dry)
        if reason:
            return f"{parameter_name(parameter)} {reason}"
    return ""


def reduce_refusal(group: Any, modules: Torch) -> str:
    """This rank's reason against reducing the group; it goes into the vote."""
    comm = group._reduce_scatter_comm
    if type(comm) is not modules.collectives.DefaultReduceScatter:
        return f"a custom reduce-scatter is set ({type(comm).__name__})"
    default = getattr(modules.collectives, "_default_reduce_scatter_input_fn", None)
    if getattr(group, "_prepare_reduce_scatter_inputs", default) is not default:
        return "a function of its own lays this group's gradients out"
    return ""


def parameter_name(parameter: Any) -> str:
    return parameter._param_fqn or parameter._module_info.param_name


def _parameter_refusal(parameter: Any, dry: bool) -> str:
    if parameter.offload_to_cpu:
        return "is offloaded to the CPU between its uses"
    local = parameter._sharded_local_tensor
    if hasattr(local, "fsdp_pre_all_gather"):
        return f"changes its bytes before the all-gather ({type(local).__name__} is an extension)"
    if type(local) is not torch.Tensor:
        return f"is a {type(local).__name__}, not a plain tensor"
    if local.is_meta and not dry:
        return "is on the meta device"
    if local.layout != torch.strided or local.is_quantized:
        return f"has the layout {local.layout}"
    return ""


def process_group_name(group: dist.ProcessGroup) -> str:
    return group.group_desc or group.group_name
