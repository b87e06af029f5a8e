"""A small Llama-like language model over bytes, and the text it learns from.

Shapes: B sequences of T bytes; D = width, H heads of D / H, F = hidden width of the gated MLP, 256
symbols.
"""

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    layers: int = 6
    width: int = 256
    heads: int = 4
    hidden: int = 704
    context: int = 128


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).to(x.dtype) * self.weight


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: pair i of each head turns by position * 10000^(-2 i / head width). x: (B,
    H, T, D / H)."""
    time, half = x.shape[-2], x.shape[-1] // 2
    frequency = 10000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.arange(time, dtype=torch.float32)[:, None] * frequency
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class Block(nn.Module):
    """Attention and a SwiGLU MLP, each behind a norm: nine parameters, one FSDP2 group."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = RMSNorm(shape.width)
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.width, bias=False)
        self.value = nn.Linear(shape.width, shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = RMSNorm(shape.width)
        self.gate = nn.Linear(shape.width, shape.hidden, bias=False)
        self.up = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        h = self.attention_norm(x)
        q, k, v = (
            layer(h).view(batch, time, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        h = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.output(h.transpose(1, 2).reshape(batch, time, width))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(256, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, 256, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=self._spread(name, parameter))

    def _spread(self, name: str, parameter: nn.Parameter) -> float:
        """Standard deviation at the start: one over the root of the inputs, less where blocks add
        to the stream."""
        if name.startswith("embedding"):
            return 0.5
        if name.startswith("head"):
            return 0.02
        added = name.endswith(("output.weight", "down.weight"))
        terms = 2 * self.shape.layers if added else 1
        return float((parameter.shape[1] * terms) ** -0.5)

    def forward(self, symbols: Tensor) -> Tensor:
        """symbols: (B, T) of 0..255. Returns logits (B, T, 256)."""
        x = self.embedding(symbols)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def read_text(folder: Path | None) -> Tensor:
    """The text as bytes: every .py file of `folder`, by default of Python's standard library (tests
    left out)."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
    files = sorted(
        path
        for path in root.rglob("*.py")
        if not unwanted.intersection(path.relative_to(root).parts)
    )
    data = b"\n".join(path.read_bytes() for path in files)
    if len(data) < 100_000:
        raise SystemExit(
            f"tide demo: {root} holds only {len(data)} bytes of .py files; name another by --text"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batch_of(
    text: Tensor, step: int, rank: int, sequences: int, context: int
) -> tuple[Tensor, Tensor]:
    """The same sequences for the same (step, rank), whatever the backend. Two (B, T) tensors:
    bytes, next bytes."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(len(text) - context - 1, (sequences, 1), generator=generator)
    rows = text[starts + torch.arange(context + 1)].long()
    return rows[:, :-1], rows[:, 1:]


@torch.no_grad()
def continue_text(model: nn.Module, prompt: bytes, count: int, context: int) -> bytes:
    """Samples `count` bytes after `prompt`, each from the 12 likeliest. Calls `model` only, no
    collective of its own."""
    generator = torch.Generator().manual_seed(7)
    symbols = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([symbols[-context:]]))[0, -1].float() / 0.7
        best = logits.topk(12)
        choice = torch.multinomial(best.values.softmax(0), 1, generator=generator)
        symbols.append(int(best.indices[choice]))
    return bytes(symbols)
