"""A small mixture-of-experts language model from scratch, for `tide parity`:

    tide parity python/tide/demo/moe.py --ranks 3 --out moe -- --steps 1000

Bytes of the Python standard library's sources. The experts of a block are a group of their own, the
rest of the block is one, and the root.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tide.demo.model import read_text


class Experts(nn.Module):
    """Each token goes to the two experts that its router likes best."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) * (2 * width) ** -0.5)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        hidden = F.silu(torch.einsum("td,edh->teh", x, self.up))
        return torch.einsum("teh,ehd,te->td", hidden, self.down, weights)


class Block(nn.Module):
    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.heads = 4
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.router = nn.Linear(width, experts)
        self.experts = Experts(width, experts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.mix(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        tokens = self.second(x).view(-1, width)
        best, index = self.router(tokens).topk(2)
        weights = torch.zeros(len(tokens), self.router.out_features, dtype=x.dtype)
        weights = weights.scatter(1, index, best.softmax(-1))
        out: torch.Tensor = x + self.experts(tokens, weights).view(x.shape)
        return out


class Model(nn.Module):
    def __init__(self, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256)

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        x = self.letters(letters)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--fp32", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    text = read_text(None)
    model = Model(given.width, given.layers, given.experts)
    dtype = None if given.fp32 else torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        assert isinstance(block, Block)
        fully_shard(block.experts, mp_policy=policy)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = torch.Generator().manual_seed(dist.get_rank())
    for step in range(given.steps):
        at = torch.randint(len(text) - given.length - 1, (given.batch,), generator=draw)
        rows = torch.stack([text[a : a + given.length + 1] for a in at]).long()
        logits = model(rows[:, :-1]).float()
        loss = F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step} loss {mean.item() / dist.get_world_size():.8f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
