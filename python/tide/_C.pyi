"""The compiled part of tide as Python sees it (backend/c10d)."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Store, Work

TORCH_VERSION: str
"""The torch that this module was built for, "major.minor"."""

class Options(torch._C._distributed_c10d.Backend.Options):
    """One group's settings; made by tide.Options. Empty words and negative numbers follow their knobs."""

    def __init__(self, timeout: timedelta = ...) -> None: ...
    inner_cpu: str
    inner_cuda: str
    node_size: int
    memory_mode: str
    fsdp: str
    multicast: str
    own_collectives: int
    arena_limit_bytes: int
    staging_slice_bytes: int
    landing_slice_bytes: int
    flight_record_size: int
    rails: str
    ucx_library: str
    ucx_candidates: list[str]
    schedule: str
    pacing: str
    head_bytes: int

class Backend(torch._C._distributed_c10d.Backend):
    """The c10d backend. Serves the layout collectives itself and hands everything else to inner backends."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: Options,
        make_inner: Callable[[str], torch._C._distributed_c10d.Backend | None],
        make_child: Callable[[Store, int, int, Any], torch._C._distributed_c10d.Backend],
    ) -> None:
        """make_inner is asked once per device type; make_child for a group that c10d splits off this one."""
    @property
    def options(self) -> Options: ...
    def inner(self, device_type: str) -> torch._C._distributed_c10d.Backend:
        """The inner backend for "cpu" or "cuda", made now if need be (collective then)."""
    def inner_if_made(self, device_type: str) -> torch._C._distributed_c10d.Backend | None: ...

    # FSDP2 groups (python/tide/fsdp). All collective, same order on all ranks.
    # On a GPU a call comes behind the current stream, and its Work's waits order the current stream
    # behind it.
    def plan(
        self,
        requests: Sequence[PlanRequest],
        prefetch_depth: int,
        device: torch.device = ...,
    ) -> list[PlanAnswer]:
        """One vote over all groups of a root, whose parameters are on `device`. Raises DistBackendError when the
        vote itself fails."""
    def gather(
        self, plan: int, shards: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> GatherWork | None:
        """Binds each output's (empty) storage to its place in a slot and starts the pushes.

        None when no slot is free: the caller takes the stock path this once, on all ranks alike.
        """
    def vacate(self, plan: int) -> None:
        """The plan's slot is free from here in call order; no-op when it holds none."""
    def forget(self, plan: int) -> None:
        """The plan's group is gone: no call names it any more. A later vote in which all ranks say so retires it,
        once no storage is bound to its slot. Waits for nothing; may be called by a finalizer."""
    def reduce(
        self,
        plan: int,
        parameters: Sequence[int],
        gradients: Sequence[torch.Tensor],
        output: torch.Tensor,
        op: str,
        scale: float,
        slot_reuse: bool,
    ) -> ReduceWork:
        """Sums `gradients` (full, contiguous, of the plan's `parameters` in this order) over the ranks in fp32.

        `output` is flat, in shard order: for each named parameter its padded shard, in `output`'s dtype.
        `parameters` in any order; the flat output follows the given order. op: "sum", "min" or "max".
        """

    # tide.lists: `rows` per tensor as in tide.GroupLayout, empty for all 1. Wrong arguments raise
    # RuntimeError naming the tensor, wanted and got.
    def allocate(
        self, sizes: Sequence[int], dtype: torch.dtype, device: torch.device = ...
    ) -> torch.Tensor:
        """A zeroed tensor of this shape in memory that peers can write. Collective."""
    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Moves the tensors' storages to such memory. Collective."""
    def gather_layout(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], rows: Sequence[int]
    ) -> Work:
        """outputs[i] (inputs[i].numel() * ranks elements, same dtype) gets the inputs[i] of all ranks."""
    def reduce_layout(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        rows: Sequence[int],
        op: str,
        scale: float,
    ) -> Work:
        """`output`, flat, gets this rank's shard of each reduced input, one after another in list order."""

    def counters(self) -> dict[str, int]:
        """Since creation: operations, bytes_pushed, bytes_copied, bytes_summed, copies_to_all, read_adds, bytes_sent
        (to other nodes); arena_bytes and plans: held now."""
    def no_multicast(self) -> str | None:
        """Why slots on the GPU are not open to all by NVLink multicast, the same on all ranks; "": they are. None: no GPU served yet."""
    def flight_record(self) -> str:
        """JSON: the last operations of tide's own with their state; an empty list before the first."""
    def wait_times(self) -> str:
        """JSON: by subject and kind of call, host time waited by cause and by rank, and a histogram."""
    def nodes(self) -> str:
        """JSON: nodes, local_ranks, and this rank's node, local, rail, device, transport, version and notes, once the
        group is up and spans nodes; "{}" otherwise."""
    def why_delegated(self) -> dict[str, str]:
        """Operation name -> reason of its last delegation, for those operations tide has a path of its own for."""

class PlanRequest:
    """One FSDP2 group as the seam asks for it; the same on all ranks, `refusal` apart.

    refusal: why this rank cannot serve it. stays_unsharded: keeps a slot of its own. may_lease: its vacated slot may
    be staging. gradient_dtype: the expected one.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[ParameterSpec],
        refusal: str = "",
        serve_gather: bool = True,
        serve_reduce: bool = True,
        stays_unsharded: bool = False,
        may_lease: bool = True,
        gradient_dtype: torch.dtype = ...,
    ) -> None: ...

class ParameterSpec:
    """One parameter: element counts of the padded shard (equal on all ranks) and of the unsharded parameter without
    padding, dtypes of both, and the runs of one shard in the unsharded parameter (1 for dimension 0)."""

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        shard_dtype: torch.dtype,
        shard_numel: int,
        unsharded_numel: int,
        rows: int = 1,
    ) -> None: ...

class PlanAnswer:
    """What the vote said, equal on all ranks. reason: the first refusing rank's, when not accepted."""

    accepted: bool
    reason: str
    plan: int
    staging: str  # "none", "leased", "area"
    slot_bytes: int

class DryPlan:
    """What a vote would say if all ranks asked alike, of an empty arena."""

    answers: list[PlanAnswer]
    shared_slots: int  # of the ring
    shared_slot_bytes: int
    arena_bytes: int  # of one rank

def dry_plan(
    requests: Sequence[PlanRequest], ranks: int, prefetch_depth: int, options: Options
) -> DryPlan:
    """Planning without peers. ValueError when the requests cannot be voted about."""

class TideWork(Work):
    """One of tide's own collectives."""

    def wait_read(self) -> None:
        """Returns when this rank's inputs have been read; they may be freed or overwritten then."""

class GatherWork(TideWork):
    slot: int  # index in the arena

class ReduceWork(TideWork): ...

def bind_storage(tensor: torch.Tensor, address: int, nbytes: int, keep_alive: object) -> None:
    """Lets the tensor's empty storage lie at `address`; `keep_alive` is dropped when torch frees it. ValueError if not empty."""

def storage_is_bound(tensor: torch.Tensor) -> bool:
    """Whether the tensor's storage lies in a tide slot now."""
