"""Gather: unsharded parameters live in a slot of the arena, and shards are pushed straight to their
places there.

Stock allocates one buffer, copies every shard in, gathers, and copies every parameter out. Here the
parameters' own storages are bound to the slot by `Backend.gather`, so there is nothing to copy in
or out; the storages are released by torch's own `resize_(0)` when the group reshards, and the slot
is vacated right after that, in call order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import AllGatherResult
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from tide import dumps
from tide.fsdp import ranges
from tide.fsdp.comm import TideAllGather
from tide.fsdp.probes import Arguments
from tide.fsdp.record import GroupRecord
from tide.fsdp.streams import current_stream, on_stream


class GatherResult(AllGatherResult):
    """What `unshard` keeps until `wait_for_unshard`. Field 2 is the work exactly when async_op was
    asked for."""

    record: GroupRecord
    work: Any  # GatherWork; None once waited for
    shards: list[torch.Tensor]  # alive until the pushes have read them
    fsdp_params: Sequence[Any]

    def wait(self) -> None:
        """Every shard has arrived, and this rank's own pushes have read theirs: here on the CPU, in
        the current stream's order on a GPU."""
        work, self.work = self.work, None
        if self.record.pending is self:
            self.record.pending = None
        stream = current_stream(self.all_gather_output.device)
        if stream is not None and self.all_gather_event is not None:
            stream.wait_event(self.all_gather_event)
        if work is not None:
            with dumps.on_error(), ranges.wait_for_gather(self.record):
                work.wait()
        self.shards = []

    def drop(self) -> None:
        """Nobody will use this result: waits for it, releases the storages and vacates the slot."""
        try:
            self.wait()
        finally:
            for parameter in self.fsdp_params:
                parameter.free_unsharded_param()
            self.record.vacate()


def all_gather(
    stock: Callable[..., Any], arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`foreach_all_gather` for marked groups; every other group gets the original."""
    comm = arguments.get("all_gather_comm", args, kwargs)
    if not isinstance(comm, TideAllGather):
        return stock(*args, **kwargs)
    record = comm.record
    fsdp_params = arguments.get("fsdp_params", args, kwargs)
    if record.pending is not None:
        record.pending.drop()
    reason = refusal(record, fsdp_params, arguments.get("group", args, kwargs))
    stream = arguments.get("all_gather_stream", args, kwargs)
    async_op = arguments.get("async_op", args, kwargs)
    result = None
    if not reason:
        record.vacate()  # released without a reshard; a no-op otherwise
        on_gpu = current_stream(arguments.get("device", args, kwargs)) is not None
        if on_gpu:  # what torch would copy in comes first
            stream.wait_stream(arguments.get("all_gather_copy_in_stream", args, kwargs))
        outputs = [
            _output(p, facts, record.ranks)
            for p, facts in zip(fsdp_params, record.parameters, strict=True)
        ]
        with on_stream(stream if on_gpu else None):
            result = _start(record, fsdp_params, outputs)
            if result is not None and on_gpu and not async_op:
                result[0].wait()  # the event below then stands for the arrival
    if result is None:
        record.stock_calls[reason or "gather: no slot was free for this call"] += 1
        return stock(*args, **kwargs)
    work, shards = result
    empty = torch.empty(0, device=shards[0].device)
    event = stream.record_event()
    gathered = GatherResult(empty, event, work if async_op else None, [], [], [])
    gathered.record = record
    gathered.work = None if on_gpu and not async_op else work
    gathered.shards = shards
    gathered.fsdp_params = fsdp_params
    record.pending = gathered
    return gathered


def copy_out(
    stock: Callable[..., Any], arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`foreach_all_gather_copy_out`: nothing to copy for tide's results, only to wait."""
    result = arguments.get("all_gather_result", args, kwargs)
    if not isinstance(result, GatherResult):
        return stock(*args, **kwargs)
    result.wait()
    return None


def refusal(record: GroupRecord, fsdp_params: Sequence[Any], group: Any) -> str:
    """Why this one gather goes stock. A function of what is equal on all ranks; empty: tide
    gathers."""
    if record.gather_backend is None:
        return record.reason
    if group is not record.gather_group:
        return "gather: reshard_after_forward=int gathers over another process group in backward"
    for parameter, facts in zip(fsdp_params, record.parameters, strict=True):
        if parameter.sharded_state != ShardedState.SHARDED:
            return "gather: the group is resharded to a smaller mesh (reshard_after_forward=int)"
        if getattr(parameter, "keep_unsharded_storage", False):
            return "gather: set_keep_unsharded_storage keeps the parameters at their addresses"
        shard = parameter._sharded_param_data
        if shard.dtype != facts.shard_dtype or shard.numel() != facts.shard_numel:
            return (
                f"gather: {facts.name} changed after planning: its shard has {shard.numel()} "
                f"elements of {shard.dtype}, not {facts.shard_numel} of {facts.shard_dtype}"
            )
        outputs = parameter.all_gather_outputs
        if outputs and (len(outputs) != 1 or outputs[0].dtype != facts.dtype):
            return f"gather: {facts.name} was unsharded as {outputs[0].dtype}, not {facts.dtype}"
        if outputs and outputs[0].untyped_storage().size() != 0:
            return f"gather: {facts.name} still has its unsharded storage"
    return ""


def _start(
    record: GroupRecord, fsdp_params: Sequence[Any], outputs: list[torch.Tensor]
) -> tuple[Any, list[torch.Tensor]] | None:
    """Binds the outputs and starts the pushes. None when no slot is free, on all ranks alike."""
    backend = record.gather_backend
    assert backend is not None
    # A shard that is not contiguous is repaired here: a rank must not go stock alone.
    shards = [p._sharded_param_data.detach().contiguous() for p in fsdp_params]
    with dumps.on_error(), ranges.gather(record):
        work = backend.gather(record.gather_plan, shards, outputs)
    if work is None:
        return None
    record.gathers += 1
    record.holds_slot = True
    return work, shards


def _output(parameter: Any, facts: Any, ranks: int) -> torch.Tensor:
    """The tensor whose storage is the unsharded parameter's: empty now, made on first use as torch
    makes it."""
    if not parameter.all_gather_outputs:
        output = torch.empty(facts.shard_numel * ranks, dtype=facts.dtype, device=parameter.device)
        output.untyped_storage().resize_(0)
        parameter.all_gather_outputs = [output]
    result = parameter.all_gather_outputs[0]
    assert isinstance(result, torch.Tensor)
    return result
