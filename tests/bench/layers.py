"""One layer of three public models, with their shapes and random weights: Llama-3.1 70B, a
mixture-of-experts layer of Qwen3-30B-A3B, and a block like Wan 14B's diffusion transformer.

A layer takes (tokens, width) and gives the same shape. Eager code, bf16 products.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as functional
from torch import nn


@dataclass(frozen=True)
class AttentionShape:
    width: int
    heads: int
    kv_heads: int
    head_width: int
    causal: bool = True
    normed: bool = False
    bias: bool = False


class Attention(nn.Module):
    """Self-attention over sequences of `sequence` tokens, or cross-attention to given `context`."""

    def __init__(self, shape: AttentionShape, sequence: int) -> None:
        super().__init__()
        self.shape, self.sequence = shape, sequence
        inner, inner_kv = shape.heads * shape.head_width, shape.kv_heads * shape.head_width
        self.q = nn.Linear(shape.width, inner, bias=shape.bias)
        self.k = nn.Linear(shape.width, inner_kv, bias=shape.bias)
        self.v = nn.Linear(shape.width, inner_kv, bias=shape.bias)
        self.o = nn.Linear(inner, shape.width, bias=shape.bias)
        self.q_norm = nn.RMSNorm(shape.head_width) if shape.normed else None
        self.k_norm = nn.RMSNorm(shape.head_width) if shape.normed else None

    def forward(self, x: torch.Tensor, context: torch.Tensor | None = None) -> torch.Tensor:
        shape = self.shape
        source = x if context is None else context
        q = self._heads(self.q(x), shape.heads, self.q_norm, min(self.sequence, len(x)))
        length = min(self.sequence, len(x)) if context is None else len(context)
        k = self._heads(self.k(source), shape.kv_heads, self.k_norm, length)
        v = self._heads(self.v(source), shape.kv_heads, None, length)
        if context is None:
            q, k = rotated(q), rotated(k)
        out = functional.scaled_dot_product_attention(
            q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads
        )
        return self.o(out.transpose(1, 2).reshape(len(x), -1))

    def _heads(
        self, x: torch.Tensor, heads: int, norm: nn.Module | None, length: int
    ) -> torch.Tensor:
        x = x.view(-1, length, heads, self.shape.head_width)
        return (norm(x) if norm is not None else x).transpose(1, 2)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions."""
    length, width = x.shape[-2:]
    rates = 10000.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
    angles = torch.arange(length, device=x.device)[:, None] * rates
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


class GatedFeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Every token goes to its `chosen` best experts; products of all experts in one call."""

    def __init__(self, width: int, inner: int, experts: int, chosen: int) -> None:
        super().__init__()
        self.experts, self.chosen = experts, chosen
        self.router = nn.Linear(width, experts, bias=False)
        self.gate = nn.Parameter(torch.empty(experts, inner, width))
        self.up = nn.Parameter(torch.empty(experts, inner, width))
        self.down = nn.Parameter(torch.empty(experts, width, inner))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(x).float().softmax(-1).topk(self.chosen, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        order = experts.flatten().argsort()
        counts = torch.bincount(experts.flatten(), minlength=self.experts)
        ends = counts.cumsum(0).to(torch.int32)
        rows = x[order // self.chosen]
        hidden = functional.silu(grouped(rows, self.gate, ends)) * grouped(rows, self.up, ends)
        results = grouped(hidden, self.down, ends)[order.argsort()]
        return (results.view(len(x), self.chosen, -1) * weights[..., None]).sum(1)


def grouped(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if rows.device.type == "cuda":
        return functional.grouped_mm(rows, weights.transpose(-2, -1), offs=ends)
    starts = [0, *ends.tolist()]
    parts = zip(starts, starts[1:], weights, strict=False)
    return torch.cat([rows[start:end] @ weight.t() for start, end, weight in parts])


class TransformerLayer(nn.Module):
    def __init__(self, attention: AttentionShape, sequence: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(attention.width)
        self.attention = Attention(attention, sequence)
        self.feed_forward_norm = nn.RMSNorm(attention.width)
        self.feed_forward = feed_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class DiffusionLayer(nn.Module):
    """Self-attention over all tokens, cross-attention to 512 tokens of text, feed-forward, each
    scaled and shifted."""

    def __init__(self, attention: AttentionShape, inner: int, text: int) -> None:
        super().__init__()
        width = attention.width
        self.text = text
        self.modulation = nn.Parameter(torch.empty(6, width))
        self.self_attention = Attention(attention, 1 << 40)
        self.cross_norm = nn.LayerNorm(width)
        self.cross_attention = Attention(attention, 1 << 40)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift, scale, gate, shift_out, scale_out, gate_out = self.modulation.unbind()
        width = x.shape[-1]
        y = functional.layer_norm(x, (width,)) * (1 + scale) + shift
        x = x + gate * self.self_attention(y)
        context = x[: self.text].detach()
        x = x + self.cross_attention(self.cross_norm(x), context)
        y = functional.layer_norm(x, (width,)) * (1 + scale_out) + shift_out
        return x + gate_out * self.down(functional.gelu(self.up(y), approximate="tanh"))


@dataclass(frozen=True)
class Model:
    """How many layers of which kind; `width` of what goes through."""

    name: str
    layers: int
    width: int
    make: Callable[[], nn.Module]
    parameters: str


LLAMA = AttentionShape(8192, 64, 8, 128)
QWEN = AttentionShape(2048, 32, 4, 128, normed=True)
WAN = AttentionShape(5120, 40, 40, 128, causal=False, normed=True, bias=True)
TINY = AttentionShape(64, 4, 2, 16)
SEQUENCE = 8192

MODELS = {
    "llama": Model(
        "Llama-3.1 70B",
        80,
        8192,
        lambda: TransformerLayer(LLAMA, SEQUENCE, GatedFeedForward(8192, 28672)),
        "68.5 B in layers",
    ),
    "qwen": Model(
        "Qwen3-30B-A3B",
        48,
        2048,
        lambda: TransformerLayer(QWEN, SEQUENCE, Experts(2048, 768, 128, 8)),
        "29.9 B in layers",
    ),
    "wan": Model(
        "Wan-like 14B", 40, 5120, lambda: DiffusionLayer(WAN, 13824, 512), "14.1 B in layers"
    ),
}
TINY_MODELS = {
    "llama": Model(
        "tiny", 2, 64, lambda: TransformerLayer(TINY, 32, GatedFeedForward(64, 128)), "tiny"
    ),
    "qwen": Model(
        "tiny experts", 2, 64, lambda: TransformerLayer(TINY, 32, Experts(64, 32, 8, 2)), "tiny"
    ),
    "wan": Model(
        "tiny diffusion",
        2,
        64,
        lambda: DiffusionLayer(AttentionShape(64, 4, 4, 16, False, True, True), 128, 8),
        "tiny",
    ),
}


def randomise(module: nn.Module) -> None:
    """Small normal weights; norms' weights near one."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            plain = getattr(parameter, "_local_tensor", parameter)
            plain.normal_(1.0 if "norm" in name and name.endswith("weight") else 0.0, 0.02)
