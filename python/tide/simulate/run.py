"""One simulated step of every system, and what the verb says of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from tide.simulate import memory, step, systems
from tide.simulate.clusters import Cluster
from tide.simulate.models import Model
from tide.simulate.systems import GroupCost, Place

CROWDED = "tide, no SM free"
"""tide beside products that fill every SM, so that each of its kernels waits for one to end."""


@dataclass(frozen=True)
class Question:
    cluster: Cluster
    nodes: int
    local_ranks: int
    model: Model
    tokens: int
    sequence: int
    recompute: bool = False
    schedule: str = "best"
    reduce_bytes: int = 4
    nccl: str = "auto"
    memory_mode: str = "in_place"
    simulated: dict[Any, Any] = field(default_factory=dict)

    def place(self, cluster: Cluster | None = None) -> Place:
        place = Place(
            cluster or self.cluster,
            self.nodes,
            self.local_ranks,
            reduce_bytes=self.reduce_bytes,
            schedule=self.schedule,
            nccl=self.nccl,
            simulated=self.simulated,
        )
        speed = self.cluster.flops / place.known["measured_flops"]
        largest = self.model.largest
        flop = 2.0 * largest.active * self.tokens
        place.product_s = flop / (place.known["product_rate"] * speed) / largest.products
        return place


@dataclass(frozen=True)
class Answer:
    system: str
    step: step.Step
    costs: list[GroupCost]
    memory_bytes: float


def answer(question: Question, system: str) -> Answer:
    place = question.place()
    named = system
    if system == CROWDED:
        place = question.place(replace(question.cluster, free_ctas=0))
        named = "tide"
    costs = [systems.cost(named, place, group) for group in question.model.groups]
    done = step.simulate(
        place, question.model, costs, question.tokens, question.sequence, question.recompute
    )
    base = "tide" if named.startswith("tide") else named
    used = memory.communication_bytes(base, place, question.model, question.memory_mode)
    return Answer(system, done, costs, used)


def answers(question: Question) -> list[Answer]:
    names = ["stock", "symmem", "tide"]
    if question.cluster.free_ctas:
        names.append(CROWDED)
    if not question.cluster.multicast:
        names.remove("symmem")  # its reduction needs a switch that adds
    return [answer(question, name) for name in names]


def as_json(question: Question, found: list[Answer]) -> dict[str, Any]:
    return {
        "kind": "simulated",
        "cluster": question.cluster.name,
        "gpu": question.cluster.gpu,
        "nodes": question.nodes,
        "gpus_per_node": question.local_ranks,
        "model": question.model.name,
        "parameters": question.model.numel,
        "active_parameters": question.model.active,
        "tokens": question.tokens,
        "sequence": question.sequence,
        "recompute": question.recompute,
        "systems": [answer_json(question, one, found[0]) for one in found],
    }


def answer_json(question: Question, one: Answer, stock: Answer) -> dict[str, Any]:
    done = one.step
    groups = zip(question.model.groups, one.costs, strict=True)
    return {
        "system": one.system,
        "step_s": done.total_s,
        "computing_s": done.computing_s,
        "exposed_s": done.exposed_s,
        "layout_copies_s": done.copies_s,
        "sm_s": done.sm_s,
        "resident_share": done.resident_s / done.total_s,
        "rail_bytes": done.rail_bytes,
        "memory_bytes": one.memory_bytes,
        "gain_over_stock": 1 - done.total_s / stock.step.total_s,
        "groups": [group_json(group.name, cost) for group, cost in groups],
        "timeline": [
            {"stream": t.stream, "name": t.name, "begin_s": t.begin_s, "end_s": t.end_s}
            for t in done.tasks
        ],
    }


def group_json(name: str, cost: GroupCost) -> dict[str, Any]:
    return {
        "group": name,
        "gather_s": cost.gather.alone_s,
        "gather_beside_products_s": cost.gather.beside_s,
        "reduce_s": cost.reduce.alone_s,
        "reduce_beside_products_s": cost.reduce.beside_s,
        "schedule": cost.gather.schedule,
        "copies_s": cost.copy_in_s + cost.copy_out_s + cost.pack_s,
    }
