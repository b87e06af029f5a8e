"""Reduce: gradients are read where autograd left them and summed in fp32 into the flat output in
shard order.

Torch's own `foreach_reduce` runs, with three things substituted: the input buffer is a placeholder
of one element, the copy into it does nothing, and the reduce-scatter is `Backend.reduce`. What
follows (all-reduce of HSDP, hooks, division, cast, accumulation, offload) stays torch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from tide import dumps
from tide.fsdp import ranges
from tide.fsdp.comm import TideReduceScatter
from tide.fsdp.probes import Arguments, Torch
from tide.fsdp.record import SLOT_REUSE, GroupRecord
from tide.fsdp.streams import current_stream

PLACEHOLDER = "_tide_placeholder"
# Gradient and output dtypes that go together: the first three are summed in fp32, fp64 in fp64.
SUMMED_TOGETHER = ((torch.float32, torch.bfloat16, torch.float16), (torch.float64,))


class ReduceCall:
    """One `foreach_reduce` on tide: lives while torch's function runs."""

    def __init__(
        self,
        record: GroupRecord,
        fsdp_params: Sequence[Any],
        gradients: Sequence[torch.Tensor],
        divide_factor: float | None,
    ) -> None:
        self.record = record
        self.indices = [record.index_of[id(p)] for p in fsdp_params]
        # Autograd's tensors, held until they have been read.
        self.gradients = [readable(gradient) for gradient in gradients]
        self.divide_factor = divide_factor
        self.slot_reuse = moves_gradients(record)
        self.placeholder: torch.Tensor | None = None
        # On a GPU: the gradients have been read. None on the CPU, where that has happened.
        self.read_event: Any = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """First the input buffer, then the output, as torch asks for them."""
        if self.placeholder is not None:
            return torch.empty(*size, dtype=dtype, device=device)
        # It holds one: what torch divides its input buffer by (fp16) can be read from it
        # afterwards. It stays on the host whatever the device, so reading it waits for nothing.
        self.placeholder = torch.ones(1, dtype=torch.float32)
        setattr(self.placeholder, PLACEHOLDER, True)
        return self.placeholder

    def run(self, output: torch.Tensor, op: Any) -> None:
        """Starts the reduction and waits for it: on the CPU torch's function goes on with the
        complete output, on a GPU what it enqueues on its (the current) stream does."""
        record = self.record
        assert record.reduce_backend is not None and self.placeholder is not None
        with ranges.reduce(record):
            self._run(record, record.reduce_backend, output, op)
        record.reduces += 1

    def _run(self, record: GroupRecord, backend: Any, output: torch.Tensor, op: Any) -> None:
        work = backend.reduce(
            record.reduce_plan,
            self.indices,
            self.gradients,
            output,
            "sum",
            self._scale(op),
            self.slot_reuse,
        )
        work.wait_read()
        stream = current_stream(output.device)
        if stream is None:
            self.gradients.clear()
        else:  # torch holds them until its compute stream has waited for this
            self.read_event = stream.record_event()
        work.wait()

    def _scale(self, op: Any) -> float:
        assert self.placeholder is not None
        scale = float(self.placeholder)
        if op == ReduceOp.AVG:
            return scale / self.record.ranks
        if op == ReduceOp.SUM:
            return scale
        # The factor inside a premultiplying operation cannot be read back; it is the one that torch
        # built it from.
        assert self.divide_factor is not None, op
        return scale / self.divide_factor


def readable(gradient: torch.Tensor) -> torch.Tensor:
    """A plain contiguous tensor. What needs repair is repaired by a local copy: only this rank can
    see it, so it must not decide the path."""
    if isinstance(gradient, AsyncCollectiveTensor):
        gradient = gradient.wait()
    return gradient.contiguous()


def moves_gradients(record: GroupRecord) -> bool:
    """Whether to ask for the gradients' move into the vacated slot. The engine moves them where the
    group has vacated a slot that has no new tenant and that holds them, and reads them in place
    where not."""
    return record.memory == SLOT_REUSE and record.gather_backend is record.reduce_backend


def reduce(
    stock: Callable[..., Any],
    arguments: Arguments,
    modules: Torch,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """`foreach_reduce` for marked groups; every other group gets the original."""
    comm = arguments.get("reduce_scatter_comm", args, kwargs)
    if not isinstance(comm, TideReduceScatter):
        return stock(*args, **kwargs)
    record = comm.record

    def argument(name: str) -> Any:
        return arguments.get(name, args, kwargs)

    fsdp_params, gradients = argument("fsdp_params"), argument("unsharded_grads")
    reason = refusal(record, fsdp_params, gradients, argument)
    hook = "prepare_reduce_scatter_inputs"
    if not reason and modules.has_prepare_hook and hook in arguments:
        if argument(hook) is not modules.collectives._default_reduce_scatter_input_fn:
            reason = "reduce: a function of its own lays this group's gradients out"
        else:
            kwargs = {**kwargs, hook: padded_sizes}
    if reason:
        record.stock_calls[reason] += 1
        return stock(*args, **kwargs)
    call = ReduceCall(record, fsdp_params, gradients, argument("gradient_divide_factor"))
    if not (modules.has_prepare_hook and hook in arguments):
        _hide(gradients)
    comm.call = call
    try:
        with dumps.on_error():
            result = stock(*args, **kwargs)
    finally:
        comm.call = None
    return (call.gradients, call.read_event or result[1], *result[2:])


def copy_in(
    stock: Callable[..., Any], arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`foreach_reduce_scatter_copy_in`: nothing to copy into a placeholder."""
    if getattr(arguments.get("reduce_scatter_input", args, kwargs), PLACEHOLDER, False):
        return None
    return stock(*args, **kwargs)


def refusal(
    record: GroupRecord,
    fsdp_params: Sequence[Any],
    gradients: Sequence[torch.Tensor],
    argument: Callable[[str], Any],
) -> str:
    """Why this one reduction goes stock. A function of what is equal on all ranks; empty: tide
    reduces."""
    if record.reduce_backend is None:
        return record.reason
    if argument("reduce_scatter_group") is not record.reduce_group:
        return "reduce: set_separate_reduce_scatter_group changed the process group after planning"
    output_dtype = argument("reduce_dtype") or gradients[0].dtype  # before 2.15 None means so
    summed = next((dtypes for dtypes in SUMMED_TOGETHER if output_dtype in dtypes), ())
    if not summed:
        return f"reduce: tide does not sum into {output_dtype}"
    for parameter, gradient in zip(fsdp_params, gradients, strict=True):
        index = record.index_of.get(id(parameter))
        if index is None:
            return "reduce: the group's parameters changed after planning"
        if gradient.dtype not in summed or gradient.layout != torch.strided:
            return (
                f"reduce: the gradient of {record.parameters[index].name} is {gradient.layout} of "
                f"{gradient.dtype}, which tide does not sum into {output_dtype}"
            )
    return ""


def padded_sizes(
    fsdp_params: Sequence[Any], unsharded_grads: Sequence[torch.Tensor], world_size: int
) -> tuple[torch.Size, ...]:
    """The sizes that torch computes after it has reordered gradients of columns; only their element
    counts are used."""
    return tuple(
        torch.Size([world_size * math.prod(p.padded_sharded_param_size)]) for p in fsdp_params
    )


def _hide(gradients: list[torch.Tensor]) -> None:
    """Before 2.15 torch itself reorders gradients of parameters sharded by columns, and holds the
    last gradient until the reduction is over: it gets tensors without memory."""
    gradients[:] = [torch.empty_like(gradient, device="meta") for gradient in gradients]
