"""Planning: one vote over all parameter groups of a root, when FSDP2 initialises that root at its
first forward.

Every rank asks for the same groups in the same order, refused ones included, once per process group
concerned; process groups follow each other in the order of the modules that use them first. The
answers become `GroupRecord`s and, where a direction is served, comm markers on the group.
"""

from __future__ import annotations

import gc
import logging
import math
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

from tide.fsdp import backends, eligibility
from tide.fsdp.comm import TideAllGather, TideReduceScatter
from tide.fsdp.depth import prefetch_depth
from tide.fsdp.probes import Torch
from tide.fsdp.record import ATTRIBUTE, IN_PLACE, GroupRecord, ParameterFacts

logger = logging.getLogger("tide.fsdp")


class Candidate:
    """One group on its way into the vote."""

    def __init__(self, group: Any, modules: Torch) -> None:
        self.group = group
        self.record = GroupRecord(eligibility.group_name(group))
        setattr(group, ATTRIBUTE, self.record)
        self.refusal = ""  # this rank's own
        self.refused = ""  # what the vote said
        self.gathers = False
        self.reduces = False
        self.record.reason = eligibility.without_vote(group)
        if not self.record.reason:
            self._describe(group, modules)

    def _describe(self, group: Any, modules: Torch) -> None:
        record = self.record
        record.gather_group = group.mesh_info.shard_process_group
        record.reduce_group = group._reduce_scatter_process_group
        record.ranks = record.gather_group.size()
        record.process_group = eligibility.process_group_name(record.gather_group)
        self.gather_backend = backends.find(record.gather_group, group.device)
        self.reduce_backend = backends.find(record.reduce_group, group.device)
        if self.gather_backend is None:
            record.reason = eligibility.not_on_tide(group)
            return
        settings = backends.settings(self.gather_backend)
        record.memory = settings.memory
        if not (settings.gathers or settings.reduces):
            record.reason = eligibility.SWITCHED_OFF
            return
        try:
            self._examine(group, modules)
        except Exception as error:  # a rank that cannot even look must still vote
            self.refusal = f"{type(error).__name__} while looking at the group: {error}"
        self.gathers = settings.gathers
        self.reduces = settings.reduces and self.reduce_backend is not None
        if settings.reduces and self.reduce_backend is None:
            record.reason = "its reduce-scatter process group does not run on tide"
        elif not settings.gathers:
            record.reason = "TIDE_FSDP=reduce leaves gathers stock"
        elif not settings.reduces:
            record.reason = "TIDE_FSDP=gather leaves reductions stock"

    def _examine(self, group: Any, modules: Torch) -> None:
        record = self.record
        record.reshards_after_forward = group.post_forward_mesh_info is not None
        record.has_own_slot = not (record.reshards_after_forward and group.reshard_after_backward)
        self.refusal = eligibility.gather_refusal(
            group, modules, isinstance(self.gather_backend, backends.DryBackend)
        ) or eligibility.reduce_refusal(group, modules)
        if self.refusal:
            return
        record.parameters = tuple(parameter_facts(p) for p in group.fsdp_params)
        record.trainable_parameters = tuple(
            p.sharded_param.requires_grad for p in group.fsdp_params
        )
        record.index_of = {id(p): index for index, p in enumerate(group.fsdp_params)}
        floating = [p.dtype for p in record.parameters if p.dtype.is_floating_point]
        record.gradient_dtype = max(floating, key=lambda d: d.itemsize, default=torch.float32)

    def wanted(self) -> list[tuple[Any, bool, bool]]:
        """(backend, gathers, reduces) of each plan to ask for: one, or two where reductions have
        their own group."""
        if self.gathers and self.reduces and self.gather_backend is self.reduce_backend:
            return [(self.gather_backend, True, True)]
        wanted = [(self.gather_backend, True, False)] if self.gathers else []
        return wanted + ([(self.reduce_backend, False, True)] if self.reduces else [])

    def request(self, gathers: bool, reduces: bool) -> Any:
        record = self.record
        compiled = backends.compiled()
        return compiled.PlanRequest(
            name=record.name,
            parameters=[
                compiled.ParameterSpec(
                    name=p.name,
                    dtype=p.dtype,
                    shard_dtype=p.shard_dtype,
                    shard_numel=p.shard_numel,
                    unsharded_numel=p.unsharded_numel,
                    rows=p.rows,
                )
                for p in record.parameters
            ],
            refusal=self.refusal,
            serve_gather=gathers,
            serve_reduce=reduces,
            stays_unsharded=record.has_own_slot,
            may_lease=gathers and self.group.reshard_after_backward and record.memory == IN_PLACE,
            gradient_dtype=record.gradient_dtype,
        )

    def take(self, answer: Any, backend: Any, gathers: bool, reduces: bool) -> None:
        record = self.record
        if not answer.accepted:
            self.refused = record.reason = answer.reason
            return
        record.forget_at_end(backend, answer.plan)
        if gathers:
            record.gather_backend, record.gather_plan = backend, answer.plan
            record.slot_bytes = answer.slot_bytes
        if reduces:
            record.reduce_backend, record.reduce_plan = backend, answer.plan
            record.staging = answer.staging

    def refuse(self, reason: str) -> None:
        record = self.record
        record.reason = reason
        if record.gather_backend is not None:
            record.gather_backend.forget(record.gather_plan)
        if record.reduce_backend is not None:
            record.reduce_backend.forget(record.reduce_plan)
        record.gather_backend = record.reduce_backend = None

    def mark(self) -> None:
        """Puts tide's comm objects on the group, for the directions that are served."""
        group, record = self.group, self.record
        if record.gather_backend is not None:
            group._all_gather_comm = TideAllGather(record, group._all_gather_comm)
        if record.reduce_backend is not None:
            group._reduce_scatter_comm = TideReduceScatter(record, group._reduce_scatter_comm)


def parameter_facts(parameter: Any) -> ParameterFacts:
    dimension = parameter.fsdp_placement.dim
    return ParameterFacts(
        name=eligibility.parameter_name(parameter),
        dtype=parameter.param_dtype or parameter.orig_dtype,
        shard_dtype=parameter._sharded_param_data.dtype,
        shard_numel=parameter._sharded_param_data.numel(),
        unsharded_numel=math.prod(parameter._orig_size),
        rows=math.prod(parameter._orig_size[:dimension]) if dimension else 1,
    )


def plan_root(root: Any, modules: Torch) -> None:
    """Plans every group under this root state, on all ranks together."""
    # Before 2.14 torch lists a state once for each of its modules.
    states = list(dict.fromkeys(root._state_ctx.all_states))
    candidates = [Candidate(group, modules) for state in states for group in groups_of(state)]
    _collect_deleted_models(candidates)
    depth = prefetch_depth(root, states, groups_of)
    requests: dict[tuple[int, str], list[tuple[Candidate, Any, bool, bool]]] = {}
    for candidate in candidates:
        for backend, gathers, reduces in candidate.wanted():
            vote = (id(backend), candidate.group.device.type)
            requests.setdefault(vote, []).append((candidate, backend, gathers, reduces))
    for asked in requests.values():
        first, backend = asked[0][:2]
        answers = backend.plan([c.request(g, r) for c, _, g, r in asked], depth, first.group.device)
        for (candidate, backend, gathers, reduces), answer in zip(asked, answers, strict=True):
            candidate.take(answer, backend, gathers, reduces)
    _agree_across_replicas(candidates)
    for candidate in candidates:
        candidate.mark()
    _tell_refusals(candidates)


def _collect_deleted_models(candidates: list[Candidate]) -> None:
    """The vote gives back the slots of groups that are gone. FSDP2's modules are cycles, which go
    when garbage is collected: here, where a process group has planned before."""
    backends_asked = [backend for c in candidates for backend, _, _ in c.wanted()]
    if any(backend.counters()["plans"] for backend in backends_asked):
        gc.collect()


def _tell_refusals(candidates: list[Candidate]) -> None:
    """One line per reason of a vote that sent groups stock, on one rank."""
    if dist.get_rank() != 0:
        return
    refused: dict[str, list[str]] = {}
    for candidate in candidates:
        record = candidate.record
        if candidate.wanted() and record.gather_backend is None and record.reduce_backend is None:
            refused.setdefault(record.reason, []).append(record.name)
    for reason, names in refused.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        logger.warning("group '%s'%s goes stock: %s", names[0], others, reason)


def _agree_across_replicas(candidates: list[Candidate]) -> None:
    """With HSDP every row of the mesh has voted for itself; a group is served in all rows or in
    none."""
    replicated: dict[int, list[Candidate]] = {}
    for candidate in candidates:
        mesh = candidate.group.mesh_info
        if candidate.wanted() and isinstance(mesh, DDPMeshInfo):
            replicated.setdefault(id(mesh.replicate_process_group), []).append(candidate)
    for members in replicated.values():
        group = members[0].group.mesh_info.replicate_process_group
        rows: list[Any] = [None] * group.size()
        dist.all_gather_object(rows, [c.refused for c in members], group=group)
        for index, candidate in enumerate(members):
            reasons = [(row, answers[index]) for row, answers in enumerate(rows) if answers[index]]
            if reasons:
                row, reason = reasons[0]
                candidate.refuse(f"replica {row}, {reason}")


def groups_of(state: Any) -> list[Any]:
    """A state's parameter groups: a list since several meshes may serve one module (2.12), one
    before."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return list(groups)
