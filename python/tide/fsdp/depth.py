"""How many unsharded groups of a root are alive at once: what the slot ring must hold.

Worked example: a root with 4 blocks, one group each, default prefetch. While block 2 computes its
gradients, block 1 is being gathered: 2 groups, so depth 1. With two groups a block (dense and
experts) both blocks count twice: depth 3. A block whose attention is a group of its own keeps the
block's group beside it: depth 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


def prefetch_depth(root: Any, states: list[Any], groups_of: Callable[[Any], list[Any]]) -> int:
    """Resharding groups alive at once, less one; at least 1."""
    ring = {id(s): sum(_reshards(g) for g in groups_of(s)) for s in states}
    default = max(ring.values(), default=0)
    state_of = {id(module): s for s in states for module in s._modules}
    order = {id(module): at for at, module in enumerate(root._modules[0].modules())}
    # fully_shard([first, last]) holds its parameters from the first module's forward to the last
    # one's.
    spans = [(*_span(s._modules, order), ring[id(s)]) for s in states if len(s._modules) > 1]
    most = 2

    def visit(module: Any, above: int) -> None:
        nonlocal most
        state = state_of.get(id(module))
        if state is not None:
            if len(state._modules) == 1:
                above += ring[id(state)]
            at = order[id(module)]
            ahead = max(
                default,
                sum(ring.get(id(s), 0) for s in state._states_to_forward_prefetch),
                sum(ring.get(id(s), 0) for s in state._states_to_backward_prefetch),
            )
            beside = sum(groups for first, last, groups in spans if first <= at <= last)
            most = max(most, above + beside + ahead)
        for child in module.children():
            visit(child, above)

    visit(root._modules[0], 0)
    return most - 1


def _span(modules: Iterable[Any], order: dict[int, int]) -> tuple[int, int]:
    at = [order.get(id(module), 0) for module in modules]
    return min(at), max(at)


def _reshards(group: Any) -> bool:
    return group.post_forward_mesh_info is not None and bool(group.reshard_after_backward)
