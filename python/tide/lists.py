"""Lists of tensors for the layout collectives: memory that gathers write straight, and layouts
beyond the plain one.

The plain collectives are torch's own (``_coalescing_manager``, functional collectives). On tensors
made here they need no intermediate copy; ``GroupLayout`` adds other shard dimensions and one flat
output for reductions.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tide import _C, groups


def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """A zeroed tensor in memory that the group's other ranks can write: all-gathers into it are
    straight.

    size: as torch.empty takes it: ``empty(2, 3)``, ``empty((2, 3))``, ``empty(tensor.shape)``.
    Collective: every rank of `group` calls it in the same order with the same sizes. dtype: the
    default dtype without one. The memory goes with the tensor's last view, also after the group was
    destroyed. Raises TypeError for sizes that are no numbers, RuntimeError for negative ones and
    for more bytes than a process can address, ValueError when `device` is not tide's in this group,
    and DistBackendError when a rank cannot provide the memory.
    """
    return _backend(group, device).allocate(
        _sizes(size), dtype or torch.get_default_dtype(), torch.device(device)
    )


def register(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Moves the storages of `outputs`, with what they hold, to memory that the group's other ranks
    can write.

    outputs: dense tensors of any shapes, strides and dtypes, all on one device that tide serves;
    the outputs of a gather are of shape (ranks * n, ...) for inputs of shape (n, ...). inputs: read
    where they are, so naming them changes nothing.

    Collective, once for a list that is gathered into again and again: every rank of `group` calls
    it in the same order, with storages of the same bytes in all. Whole storages move: tensors and
    views that share them move along and keep their values; they cannot be resized afterwards. What
    lies in such memory already, and what is empty, stays. On a GPU gathers into other memory go to
    the inner backend.

    Raises RuntimeError, before anything moves, naming the tensor that is sparse or on another
    device, or whose memory is not torch's own (shared, mapped, from numpy); ValueError when the
    device is not tide's in this group; DistBackendError when a rank cannot provide the memory or
    ranks want different numbers of bytes.
    """
    del inputs
    _backend(group, _device(outputs)).register(list(outputs))


@dataclass(frozen=True)
class GroupLayout:
    """How shards lie in the whole tensors of one list, for gathers and reductions of shard
    dimensions other than 0.

    rows: per tensor, in how many runs one rank's shard lies in the whole tensor: 1 for dimension 0;
    for dimension k the product of the sizes before k. The whole tensor's size in that dimension
    must be a multiple of the ranks.

    Example: tensors of shape (4, 6) and (10,) on 2 ranks, sharded by columns and by rows:
    ``GroupLayout.of([(4, 6), (10,)], [1, 0])`` has rows (4, 1); rank 1's shards are of shape (4, 3)
    and (5,).
    """

    rows: tuple[int, ...]

    @classmethod
    def of(cls, shapes: Sequence[Sequence[int]], dims: Sequence[int]) -> GroupLayout:
        """The layout of whole tensors of these shapes, each sharded along its entry of `dims`."""
        rows = []
        for shape, dim in zip(shapes, dims, strict=True):
            if not 0 <= dim < max(len(shape), 1):
                raise ValueError(
                    f"shard dimension {dim} is not one of a tensor of shape {tuple(shape)}"
                )
            run_count = 1
            for size in shape[:dim]:
                run_count *= size
            rows.append(max(run_count, 1))
        return cls(tuple(rows))

    def all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Gathers each rank's `inputs` to their places in `outputs` (whole tensors, contiguous, of
        the inputs' dtypes).

        Returns a Work with async_op, else None when done. Raises RuntimeError naming the tensor,
        wanted and got.
        """
        backend = _backend(group, _device(inputs))
        work = backend.gather_layout(list(outputs), list(inputs), list(self.rows))
        return _finish(work, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        op: str = "sum",
        scale: float = 1.0,
        group: dist.ProcessGroup | None = None,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduces the whole `inputs` (one dtype) over the ranks; this rank's shards go to `output`.

        output: flat, one shard after another in list order, fp32 for 16-bit inputs if wished. Sums
        are made in fp32 in rank order, multiplied by `scale` and rounded once. op: "sum", "min" or
        "max".
        """
        backend = _backend(group, _device(inputs))
        work = backend.reduce_layout(output, list(inputs), list(self.rows), op, scale)
        return _finish(work, async_op)


def _finish(work: dist.Work, async_op: bool) -> dist.Work | None:
    if async_op:
        return work
    work.wait()
    return None


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _sizes(size: tuple[int | Sequence[int], ...]) -> list[int]:
    """Of `size` as torch.empty's: numbers, or one sequence of them."""
    given: Sequence[Any] = size
    if len(size) == 1 and isinstance(size[0], Sequence):
        given = size[0]
    try:
        return [operator.index(s) for s in given]
    except TypeError:
        raise TypeError(f"sizes must be numbers or one sequence of them; got {size}") from None


def _backend(group: dist.ProcessGroup | None, device: torch.device | str) -> _C.Backend:
    backend = groups.of(group, device)
    if backend is None or torch.device(device).type not in ("cpu", "cuda"):
        raise ValueError(
            f"{torch.device(device).type} tensors of this group are not served by tide's own "
            "collectives"
        )
    return backend
