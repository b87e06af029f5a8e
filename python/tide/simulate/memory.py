"""Memory that communication takes at the peak of a step: unsharded parameters and gradients of the
groups under way and all buffers between. Shards, optimizer and activations are the same in every
system and not counted.

The peak is in the backward of a block, with the root unsharded. P: bf16 bytes of the largest
block, R: of the root.

- Stock: R; parameters P, gathered ahead P, gradients P, packed fp32 gradients 2 P.
- SymmMem: the same tensors, but its buffers (gathered, packed) come from symmetric memory, which is
  not given back for others: they have the size of the largest group.
- tide, In-Place: R; two slots in turn and one that is leased as staging, gradients of two blocks,
  and the areas that its reduce names. Slot-Reuse: two slots, gradients of one block (the others lie
  in the vacated slot), areas.
"""

from __future__ import annotations

from tide.simulate import systems
from tide.simulate.models import Model
from tide.simulate.systems import Place

MODES = ("in_place", "slot_reuse")


def communication_bytes(system: str, place: Place, model: Model, mode: str = "in_place") -> float:
    block = 2.0 * model.largest.numel
    root = 2.0 * sum(group.numel * group.count for group in model.groups if group.is_root)
    packed = place.reduce_bytes / 2
    if system == "stock":
        return root + 3 * block + packed * block
    if system == "symmem":
        widest = max(root, block)
        return root + 2 * block + widest + packed * widest
    kept = 3 if mode == "slot_reuse" else 5
    areas = 0.0  # inside a node the leased slot is enough
    if place.nodes > 1:
        areas = float(systems.simulated_alone(place, model.largest, "").area_bytes[0])
    return root + kept * block + areas
