"""How many unsharded groups of a root are alive at once: what the slot ring must hold.

Worked example: a root with 4 blocks, one group each, default prefetch. While block 2 computes its
gradients, block 1 is being gathered: 2 groups, so depth 1. With two groups a block (dense and
experts) both blocks count twice: depth 3. A block whose attention is a group of its own keeps the
block's group beside it: depth 2.
"""

from __future__ import annotations

from typing import Any


def prefetch_depth(root: Any, states: list[Any], groups_of: Any) -> int:
    """Resharding groups alive at once, less one; at least 1."""
    ring = {id(s): sum(_reshards(g) for g in groups_of(s)) for s in states}
    default = max(ring.values(), default=0)
    state_of = {id(module): s for s in states for module in s._modules}
    most = 2

    def visit(module: Any, above: int) -> None:
        nonlocal most
        state = state_of.get(id(module))
        if state is not None:
            above += ring[id(state)]
            ahead = max(
                default,
                sum(ring.get(id(s), 0) for s in state._states_to_forward_prefetch),
                sum(ring.get(id(s), 0) for s in state._states_to_backward_prefetch),
            )
            most = max(most, above + ahead)
        for child in module.children():
            visit(child, above)

    visit(root._modules[0], 0)
    return most - 1


def _reshards(group: Any) -> bool:
    return group.post_forward_mesh_info is not None
