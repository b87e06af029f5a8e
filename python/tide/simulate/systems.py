"""What one parameter group costs to gather and to reduce: stock FSDP2 over NCCL, FSDP2 with
symmetric memory ("SymmMem"), and tide.

tide's numbers are those of its programs in the C++ simulator. The others are formulas over the same
constants:

- NCCL's ring: the slowest of what its CTAs move, links and rails, and one hop a rank. NVLS: the
  switch copies or adds inside a node, one hop a node.
- SymmMem: copy engines gather, the switch adds, rails carry each byte once; stock's layout copies
  stay.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from tide.simulate.clusters import Cluster, constants
from tide.simulate.models import Group
from tide.simulate.native import native

ALL_RANKS = 64
"""Nodes up to which every rank is simulated; beyond, one node stands for all."""

RING_RANKS = 512
"""Ranks up to which stock's NCCL is taken to choose its ring."""

SCHEDULES = ("doubling", "ring", "direct")


@dataclass(frozen=True)
class Collective:
    """One gather or reduce of a group, on one GPU."""

    alone_s: float
    beside_s: float  # while products run without a gap
    ctas: float = 0.0  # held, on average
    sm_s: float = 0.0
    resident_s: float = 0.0  # some kernel of it is on an SM
    traffic: float = 0.0  # bytes read and written in GPU memory
    rail_bytes: float = 0.0  # sent
    schedule: str = ""
    area_bytes: float = 0.0  # arena that it needs beside slots


@dataclass(frozen=True)
class GroupCost:
    """Copies take the whole GPU, so they stand in the way of computing."""

    gather: Collective
    reduce: Collective
    copy_in_s: float = 0.0
    copy_out_s: float = 0.0
    pack_s: float = 0.0


@dataclass
class Place:
    """Where collectives run: a cluster of so many nodes, and what runs beside them."""

    cluster: Cluster
    nodes: int
    local_ranks: int
    product_s: float = 0.0  # length of the products that kernels wait for
    reduce_bytes: int = 4  # stock's reduce dtype
    schedule: str = "best"
    nccl: str = "auto"  # ring, nvls, auto
    nccl_ctas: int = 0
    simulated: dict[Any, Any] = field(
        default_factory=dict
    )  # alone; places of one question share it

    @property
    def ranks(self) -> int:
        return self.nodes * self.local_ranks

    @cached_property
    def known(self) -> dict[str, float]:
        return constants()

    @cached_property
    def numbers(self) -> dict[str, float]:
        return self.cluster.numbers()

    @property
    def memory(self) -> float:
        """How much faster this GPU's memory is than the measured one's."""
        return self.cluster.hbm / self.known["measured_hbm"]

    @property
    def ctas(self) -> int:
        return self.nccl_ctas or int(self.known["nccl_ctas"])

    def uses_switch(self) -> bool:
        if self.nccl == "auto":
            return self.cluster.multicast and self.ranks > RING_RANKS
        return self.nccl == "nvls" and self.cluster.multicast

    def simulate(
        self, calls: list[Any], product_s: float = 0.0, one_node: bool | None = None
    ) -> Any:
        numbers = {**self.numbers, "product_s": product_s}
        folded = self.nodes > ALL_RANKS if one_node is None else one_node
        report = native().simulate(calls, self.nodes, self.local_ranks, numbers, folded, -1)
        if report.error:
            raise RuntimeError(f"the simulated programs do not end: {report.error}")
        return report

    def gather_call(self, group: Group, schedule: str) -> Any:
        call = native().SimulatedCall()
        call.is_gather = True
        call.numels = list(group.numels)
        call.schedule = getattr(native().GatherSchedule, schedule)
        return call

    def reduce_call(self, group: Group) -> Any:
        call = native().SimulatedCall()
        call.is_gather = False
        call.numels = list(group.numels)
        call.read_add = self.cluster.multicast and self.local_ranks > 1
        return call


def layout_copies(place: Place, group: Group) -> tuple[float, float, float]:
    """Seconds of copy-in, copy-out and packing (chunk_cat; without widening it writes half)."""
    total = 2.0 * group.numel
    packed = total * (1 + place.reduce_bytes / 2) / 3
    return (
        total / place.ranks / (place.known["copy_in_rate"] * place.memory),
        total / (place.known["copy_out_rate"] * place.memory),
        packed / (place.known["chunk_cat_rate"] * place.memory),
    )


def nccl(place: Place, moved: float, per_cta: float, share: float, traffic: float) -> Collective:
    """An NCCL collective over `moved` bytes in all (gathered, or given to the reduction)."""
    hop, numbers = place.known["nccl_hop"], place.numbers
    arriving = moved * (place.ranks - 1) / place.ranks
    across = arriving / place.local_ranks if place.nodes > 1 else 0.0
    hops = (place.ranks - 1) * hop
    if place.uses_switch():
        across = moved * (place.nodes - 1) / place.nodes / place.local_ranks
        hops = (place.nodes + 1) * hop
    wires = max(arriving / numbers["push_rate"], across / numbers["rail_rate"])
    by_ctas = moved / (place.ctas * per_cta)
    alone = hops + max(by_ctas, wires)
    return Collective(
        alone,
        hops + max(by_ctas / share, wires),
        ctas=place.ctas,
        sm_s=place.ctas * alone,
        resident_s=alone,
        traffic=traffic,
        rail_bytes=across,
    )


def stock(place: Place, group: Group) -> GroupCost:
    total = 2.0 * group.numel
    known = place.known
    given = total * place.reduce_bytes / 2
    return GroupCost(
        nccl(place, total, known["nccl_gather_per_cta"], known["nccl_gather_share"], 2 * total),
        nccl(place, given, known["nccl_reduce_per_cta"], known["nccl_reduce_share"], 3 * given),
        *layout_copies(place, group),
    )


def symmem(place: Place, group: Group) -> GroupCost:
    total = 2.0 * group.numel
    given = total * place.reduce_bytes / 2
    hops = (place.nodes + 1) * place.known["nccl_hop"]
    sent = (place.nodes - 1) / place.nodes / place.local_ranks
    a_byte = max(1 / place.numbers["push_rate"], sent / place.numbers["rail_rate"])
    gather_s, reduce_s = hops + total * a_byte, hops + given * a_byte
    return GroupCost(
        Collective(gather_s, gather_s, traffic=2 * total, rail_bytes=total * sent),
        Collective(
            reduce_s,
            reduce_s,
            ctas=place.ctas,
            sm_s=place.ctas * reduce_s,
            resident_s=reduce_s,
            traffic=2 * given,
            rail_bytes=given * sent,
        ),
        *layout_copies(place, group),
    )


def tide(place: Place, group: Group) -> GroupCost:
    return GroupCost(tide_gather(place, group), tide_reduce(place, group))


def tide_gather(place: Place, group: Group) -> Collective:
    """By the schedule that is fastest alone; the first of equals."""
    tried: tuple[str, ...] = (place.schedule,)
    if place.schedule == "best":
        tried = SCHEDULES if place.nodes > 2 else SCHEDULES[:1]
    alone = {one: simulated_alone(place, group, one) for one in tried}
    best = min(tried, key=lambda one: round(alone[one].end_s[0], 7))
    beside = place.simulate([place.gather_call(group, best)], place.product_s)
    found = collective(alone[best], beside.end_s[0])
    return replace(found, schedule=best if place.nodes > 1 else "")


def tide_reduce(place: Place, group: Group) -> Collective:
    beside = place.simulate([place.reduce_call(group)], place.product_s)
    return collective(simulated_alone(place, group, ""), beside.end_s[0])


def simulated_alone(place: Place, group: Group, schedule: str) -> Any:
    """The report of a gather by this schedule, of a reduce where there is none."""
    key = (group.numels, schedule)
    if key not in place.simulated:
        gather = place.gather_call(group, schedule) if schedule else None
        place.simulated[key] = place.simulate([gather or place.reduce_call(group)])
    return place.simulated[key]


def collective(alone: Any, beside_s: float) -> Collective:
    rank = max(alone.ranks, key=lambda one: one.end_s[0])
    moved = rank.pushed_bytes + rank.arrived_bytes + 2.0 * rank.rail_bytes
    return Collective(
        alone.end_s[0],
        beside_s,
        ctas=rank.sm_s / beside_s if beside_s else 0.0,
        sm_s=rank.sm_s,
        resident_s=rank.resident_s,
        traffic=rank.kernel_bytes + moved,
        rail_bytes=rank.rail_bytes,
        area_bytes=alone.area_bytes[0],
    )


SYSTEMS = {"stock": stock, "symmem": symmem, "tide": tide}


def cost(system: str, place: Place, group: Group) -> GroupCost:
    """`tide-gather` and `tide-reduce` serve one direction, the other is stock."""
    if system == "tide-gather":
        base = stock(place, group)
        return replace(base, gather=tide_gather(place, group), copy_in_s=0.0, copy_out_s=0.0)
    if system == "tide-reduce":
        return replace(stock(place, group), reduce=tide_reduce(place, group), pack_s=0.0)
    return SYSTEMS[system](place, group)
