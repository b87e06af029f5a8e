"""The per-group markers: comm objects that FSDP2 hands to its collectives and that carry tide's
record of the group.

Called outside the seam (or when a single call goes stock) they behave exactly as the comm object
they replaced. They derive from torch's abstract classes and not from its defaults, so that torch's
own setters, which replace only comms they know, raise instead of dropping tide silently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

if TYPE_CHECKING:
    from tide.fsdp.record import GroupRecord
    from tide.fsdp.reduce import ReduceCall


class TideAllGather(AllGather):
    def __init__(self, record: GroupRecord, stock: AllGather) -> None:
        self.record = record
        self.stock = stock

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        return self.stock(output_tensor, input_tensor, group, async_op)


class TideReduceScatter(ReduceScatter):
    def __init__(self, record: GroupRecord, stock: ReduceScatter) -> None:
        self.record = record
        self.stock = stock
        self.call: ReduceCall | None = None  # set while foreach_reduce runs for tide

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if self.call is not None:
            return self.call.allocate(size, dtype, device)
        return self.stock.allocate(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.call is not None:
            self.call.run(output_tensor, op)
            return None
        return self.stock(output_tensor, input_tensor, group, op, async_op)
