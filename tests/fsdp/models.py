"""Small models: odd sizes, so that shards are uneven on 4 ranks, and every kind of parameter that
FSDP2 meets."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WORDS = 59
WIDTH = 24


class Block(nn.Module):
    """Norm, up (37 rows: 10, 10, 10 and 7 on 4 ranks), down; `scale` has fewer rows than ranks."""

    def __init__(self, width: int = WIDTH, hidden: int = 37) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.scale = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """Embedding, blocks, head. `tied`: the head's weight is the embedding's."""

    def __init__(self, blocks: int = 4, tied: bool = False, hidden: int = 37) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden=hidden) for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Skipping(Model):
    """Leaves out block 1 where `skip` is set."""

    skip = False

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for index, block in enumerate(self.blocks):
            if not (self.skip and index == 1):
                x = block(x)
        return self.head(x)


class Small(nn.Module):
    """Parameters with fewer rows than ranks, and one of a single element."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.squeeze = nn.Parameter(torch.randn(3, WIDTH) / 5)
        self.mix = nn.Parameter(torch.randn(2, 3) / 2)
        self.shift = nn.Parameter(torch.zeros(1))
        self.head = nn.Linear(2, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words) @ self.squeeze.t() @ self.mix.t() + self.shift
        return self.head(x)


class Many(nn.Module):
    """More than 256 parameters in one group."""

    def __init__(self, count: int = 300) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 4)
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(count))
        self.head = nn.Linear(4, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for index, gain in enumerate(self.gains):
            x = x * gain if index % 2 else x + 0.01 * gain
        return self.head(x)


class Experts(nn.Module):
    """A block with a dense part and experts whose parameters may live on another mesh."""

    def __init__(self, experts: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.expert_weight = nn.Parameter(torch.randn(experts * 6, WIDTH) / 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        chosen = torch.softmax(self.router(y), -1).repeat_interleave(6, -1)
        return x + (torch.tanh(y @ self.expert_weight.t()) * chosen) @ self.expert_weight


class ExpertModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model: nn.Module, words: torch.Tensor) -> torch.Tensor:
    """Predicts each word from itself: enough to give every parameter a gradient."""
    out = model(words)
    return F.cross_entropy(out.double().flatten(0, -2), words.flatten())


def move_by_one_ulp(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Every weight up to the next number of its own dtype, or of `dtype`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                rounded = parameter.to(dtype or parameter.dtype)
                parameter.copy_(torch.nextafter(rounded, torch.full_like(rounded, torch.inf)))
