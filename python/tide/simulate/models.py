"""Models as the simulator needs them: parameter groups and what a token costs to compute.

Shapes are those of the public models; `--model module:function` reads them from a module built on
the meta device.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tide.look import BadInput


@dataclass(frozen=True)
class Group:
    """One FSDP2 parameter group, `count` equal ones of it."""

    name: str
    numels: tuple[int, ...]
    count: int = 1
    active: int = 0  # parameters that one token is multiplied with
    hidden: int = 0  # 0: no attention, no other kernels
    products: int = 7  # of the forward
    is_root: bool = False  # gathered once a step, stays unsharded

    @property
    def numel(self) -> int:
        return sum(self.numels)


@dataclass(frozen=True)
class Model:
    name: str
    groups: tuple[Group, ...]  # in forward order; the root first
    is_causal: bool = True

    @property
    def numel(self) -> int:
        return sum(group.numel * group.count for group in self.groups)

    @property
    def active(self) -> int:
        return sum(group.active * group.count for group in self.groups)

    @property
    def largest(self) -> Group:
        """The block with the most parameters; of a model without blocks, the root."""
        blocks = [group for group in self.groups if not group.is_root]
        return max(blocks or self.groups, key=lambda group: group.numel)


def dense(name: str, hidden: int, wide: int, layers: int, kv: int, vocabulary: int) -> Model:
    """Llama's shape: norms, q, k, v, o, gate, up, down."""
    square, feed = hidden * hidden, wide * hidden
    block = (hidden, hidden, square, kv * hidden, kv * hidden, square, feed, feed, feed)
    head = vocabulary * hidden
    return Model(
        name,
        (
            Group("root", (head, hidden, head), 1, head, 0, 1, is_root=True),
            Group("block", block, layers, sum(block), hidden, 7),
        ),
    )


def qwen3_30b_a3b() -> Model:
    """48 blocks of 128 experts, 8 of them for a token; experts of a block are three parameters."""
    hidden, expert_wide, experts, chosen, vocabulary = 2048, 768, 128, 8, 151936
    attention = (hidden, hidden, 128, 128, 4096 * hidden, 512 * hidden, 512 * hidden, hidden * 4096)
    one = expert_wide * hidden
    router = experts * hidden
    head = vocabulary * hidden
    active = sum(attention) + router + 3 * chosen * one
    return Model(
        "qwen3-30b-a3b",
        (
            Group("root", (head, hidden, head), 1, head, 0, 1, is_root=True),
            Group("block", (*attention, router, *(experts * one,) * 3), 48, active, hidden, 8),
        ),
    )


def wan_14b() -> Model:
    """40 blocks of self-attention, cross-attention and a feed-forward, width 5120."""
    hidden, wide = 5120, 13824
    square = hidden * hidden
    attention = (*(square, hidden) * 4, hidden, hidden)
    block = (*attention, *attention, wide * hidden, wide, hidden * wide, hidden, 6 * hidden)
    rest = (hidden * 64, 6 * square, 4096 * hidden, square, hidden * 64)
    return Model(
        "wan-14b",
        (
            Group("root", rest, 1, hidden * 128, 0, 1, is_root=True),
            Group("block", block, 40, sum(block), hidden, 10),
        ),
        is_causal=False,
    )


BUILT_IN = {
    model.name: model
    for model in (
        dense("llama-8b", 4096, 14336, 32, 1024, 128256),
        dense("llama-70b", 8192, 28672, 80, 1024, 128256),
        qwen3_30b_a3b(),
        wan_14b(),
    )
}


def find(name: str) -> Model:
    if name in BUILT_IN:
        return BUILT_IN[name]
    if ":" not in name:
        raise BadInput(
            f"there is no model '{name}'; built in are {', '.join(BUILT_IN)}, or give "
            "module:function or script.py:function"
        )
    return from_function(name)


def from_function(name: str) -> Model:
    """The model that a function without arguments returns, built on the meta device; `name` is
    module:function or script.py:function."""
    import torch
    from torch import nn

    module_name, _, function_name = name.rpartition(":")
    try:
        function = getattr(imported(module_name), function_name)
        with torch.device("meta"):
            made = function()
    except BadInput:
        raise
    except (Exception, SystemExit) as error:
        said = " ".join(str(error).split())
        raise BadInput(f"{name} cannot be called: {type(error).__name__}: {said}") from None
    if not isinstance(made, nn.Module):
        raise BadInput(f"{name}() returned a {type(made).__name__}, wanted an nn.Module")
    return from_module(name, made)


def imported(name: str) -> Any:
    """A module of the current folder or the environment, or a script by its path."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not name.endswith(".py"):
        return importlib.import_module(name)
    if not Path(name).is_file():
        raise BadInput(f"there is no script {name}")
    sys.path.insert(0, str(Path(name).resolve().parent))
    spec = importlib.util.spec_from_file_location(Path(name).stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[Path(name).stem] = module
    spec.loader.exec_module(module)
    return module


def from_module(name: str, module: Any) -> Model:
    """Groups as one usually makes them: every child of the longest list of modules, and the rest as
    the root.

    The width is the most frequent size among the blocks' matrices.
    """
    from torch import nn

    lists = [m for m in module.modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    blocks = list(max(lists, key=len)) if lists else []
    blocks = [block for block in blocks if any(True for _ in block.parameters())]
    shapes = [tuple(tuple(p.shape) for p in block.parameters()) for block in blocks]
    inside = {id(p) for block in blocks for p in block.parameters()}
    rest = [p for p in module.parameters() if id(p) not in inside]
    if not shapes and not rest:
        raise BadInput(f"{name}: the model has no parameters")
    widths = Counter(
        size for block in shapes for shape in block if len(shape) > 1 for size in shape
    )
    hidden = widths.most_common(1)[0][0] if widths else 0
    groups = []
    if rest:
        # Of an embedding and a head, the head alone is multiplied.
        active = max((p.numel() for p in rest if p.dim() > 1), default=0)
        numels = tuple(p.numel() for p in rest)
        groups.append(Group("root", numels, 1, active, 0, 1, is_root=True))
    for position, (shape, count) in enumerate(Counter(shapes).items()):
        numels = tuple(math.prod(one) for one in shape)
        products = max(1, sum(len(one) > 1 for one in shape))
        groups.append(Group(f"block{position or ''}", numels, count, sum(numels), hidden, products))
    return Model(name, tuple(groups))
