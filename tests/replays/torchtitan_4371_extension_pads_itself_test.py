"""torchtitan 4371, pytorch 137005.

A tensor subclass may change its bytes before the all-gather and after it; where rows do not divide
(96 over 5 ranks) only the ranks with padding noticed that the subclass had not padded, and the
others hung. Right: such a group goes stock on every rank, with the reason, and the numbers of one
process; its neighbours stay on tide.
"""

from __future__ import annotations

from typing import Any

import tide
import torch
from harness import run_ranks
from reference import numbers, sharded
from torch import nn
from torch.utils import _pytree as pytree

ROWS, RANKS = 96, 5


class Halved(torch.Tensor):
    """Travels as half of itself, in padded shards, and is doubled on arrival."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Halved:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        keeps = {
            torch.ops.aten.clone.default,
            torch.ops.aten.detach.default,
            torch.ops.aten.split.Tensor,
            torch.ops.aten.new_zeros.default,
            torch.ops.aten.slice.Tensor,
            torch.ops.aten.view.default,
            torch.ops.aten.as_strided.default,
            torch.ops.aten.narrow.default,
            torch.ops.aten._to_copy.default,
        }
        if func in keeps:
            return pytree.tree_map_only(torch.Tensor, cls, result)
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        padded = torch.zeros(-(-outer_size[0] // mesh.size()), *outer_size[1:])
        padded[: self.inner.shape[0]] = self.inner / 2
        return (padded,), outer_size

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        whole = outputs[0][: metadata[0]] * 2
        if out is not None:
            with torch.no_grad():
                out.detach().copy_(whole)
            return None
        return whole, ()


def build(halved: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, ROWS, bias=False), nn.Linear(ROWS, 3, bias=False))
    for index, layer in enumerate(model):
        weight = numbers(index, *layer.weight.shape)
        layer.weight = nn.Parameter(Halved(weight) if halved and index == 0 else weight)
    return model


def test_an_extension_goes_stock_on_every_rank() -> None:
    def body(rank: int, size: int) -> str:
        model = build(halved=True)
        sharded(model, model[0], model[1])
        alone = build(halved=False)
        for seed in range(2):
            batch = numbers(100 + seed, 6, 4)
            assert torch.equal(model(batch), alone(batch))
        model(batch).square().mean().backward()
        alone(batch).square().mean().backward()
        for ours, wanted in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), wanted.grad)
        rows = {row.group: row for row in tide.report(model)}
        assert rows["1"].path == "tide" and rows["1"].reason == "", tide.report(model)
        assert rows["0"].path == "stock"
        return rows["0"].reason

    reasons = run_ranks(RANKS, body, timeout=120)
    assert len(set(reasons)) == 1
    assert "0.weight" in reasons[0] and "Halved is an extension" in reasons[0]
