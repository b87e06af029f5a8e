"""A training step of FSDP2 in virtual time: one GPU's computing, gathers and reduces on three
streams.

Order and waits are FSDP2's: the gather of the next group (forward) or of the one before (backward)
begins when this group's computing begins; a group computes once it is gathered and copied out; its
reduce follows its backward, and the packing of the next gradients waits for the last reduce's
buffer. tide has no copies and keeps gradients where they are.

Rates while things overlap: computing is slowed by the SMs that collectives hold and by their
traffic in GPU memory; collectives run at their speed beside products; a gather and a reduce share
the wires.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tide.simulate.models import Model
from tide.simulate.systems import Collective, GroupCost, Place

COMPUTE, GATHER, REDUCE = "computing", "gather", "reduce"
STREAMS = (COMPUTE, GATHER, REDUCE)


@dataclass
class Task:
    stream: str
    name: str
    work_s: float
    after: list[Task] = field(default_factory=list)
    collective: Collective | None = None
    is_copy: bool = False
    begins_with: Task | None = None  # may begin when that one begins
    begin_s: float = -1.0
    end_s: float = -1.0


@dataclass(frozen=True)
class Step:
    """What a step costs one GPU; all of it simulated."""

    total_s: float
    computing_s: float  # what it would take without communication, optimizer included
    copies_s: float
    sm_s: float
    resident_s: float
    rail_bytes: float
    tasks: tuple[Task, ...]

    @property
    def exposed_s(self) -> float:
        return self.total_s - self.computing_s


def compute_s(place: Place, model: Model, tokens: int, sequence: int) -> list[float]:
    """Forward seconds of one group of each kind."""
    known = place.known
    speed = place.cluster.flops / known["measured_flops"]
    result = []
    for group in model.groups:
        products = 2.0 * group.active * tokens / (known["product_rate"] * speed)
        pairs = tokens * sequence * (0.5 if model.is_causal else 1.0)
        attention = 4.0 * pairs * group.hidden / (known["attention_rate"] * speed)
        other = known["other_kernels"] / 3 * tokens * group.hidden / place.memory
        result.append(products + attention + other)
    return result


class Builder:
    """The tasks of a step; each stream's stand in its order."""

    def __init__(self, model: Model, costs: list[GroupCost], forward: list[float]) -> None:
        self.model = model
        self.costs = costs
        self.forward = forward
        self.tasks: list[Task] = []

    def add(self, task: Task) -> Task:
        self.tasks.append(task)
        return task

    def compute(self, kind: int, name: str, factor: float, before: Task | None) -> Task:
        """A group's computing, behind its gather (unless it is still unsharded) and its copies."""
        cost = self.costs[kind]
        after = []
        if name == "forward" or not self.model.groups[kind].is_root:
            gather = Task(GATHER, "gather", cost.gather.alone_s, collective=cost.gather)
            gather.begins_with = before
            after = [self.add(gather)]
            copies = cost.copy_in_s + cost.copy_out_s
            if copies > 0:
                after = [self.add(Task(COMPUTE, "copy-out", copies, after, is_copy=True))]
        return self.add(Task(COMPUTE, name, factor * self.forward[kind], after))

    def reduce(self, kind: int, computed: Task, last: Task | None) -> Task:
        cost = self.costs[kind]
        ready = computed
        if cost.pack_s > 0:
            waits = [computed, last] if last else [computed]
            ready = self.add(Task(COMPUTE, "pack", cost.pack_s, waits, is_copy=True))
        return self.add(Task(REDUCE, "reduce", cost.reduce.alone_s, [ready], cost.reduce))

    def build(self, backward_factor: float, optimizer_s: float) -> list[Task]:
        layers = [kind for kind, group in enumerate(self.model.groups) for _ in range(group.count)]
        computed: Task | None = None
        for kind in layers:
            computed = self.compute(kind, "forward", 1.0, computed)
        reduced: Task | None = None
        for kind in reversed(layers):
            computed = self.compute(kind, "backward", backward_factor, computed)
            reduced = self.reduce(kind, computed, reduced)
        self.add(Task(COMPUTE, "optimizer", optimizer_s, [reduced] if reduced else []))
        return self.tasks


def slowdown(place: Place, collective: Collective) -> float:
    traffic = collective.traffic / max(collective.alone_s, 1e-12)
    by_traffic = place.known["traffic_slowdown"] / place.memory * traffic
    return collective.ctas / place.cluster.sms + by_traffic


def rate(place: Place, task: Task, running: list[Task]) -> float:
    others = [one.collective for one in running if one is not task and one.collective]
    if task.collective is None:
        return 1.0 / (1.0 + sum(slowdown(place, one) for one in others))
    share = 1.0 / (1 + len(others))
    beside = any(one.stream == COMPUTE for one in running)
    if not beside or task.collective.beside_s <= 0:
        return share
    return share * task.collective.alone_s / task.collective.beside_s


def may_begin(task: Task) -> bool:
    begun = task.begins_with is None or task.begins_with.begin_s >= 0
    return begun and all(one.end_s >= 0 for one in task.after)


def play(place: Place, tasks: list[Task]) -> float:
    """Runs the tasks; each stream one at a time, in order. Returns the end."""
    waiting = {stream: [t for t in tasks if t.stream == stream][::-1] for stream in STREAMS}
    left: dict[int, float] = {}
    running: list[Task] = []
    now = 0.0
    while running or any(waiting.values()):
        begun = True
        while begun:  # one that begins may let another begin
            begun = False
            for stream, queue in waiting.items():
                busy = any(one.stream == stream for one in running)
                if queue and not busy and may_begin(queue[-1]):
                    task = queue.pop()
                    task.begin_s = now
                    left[id(task)] = task.work_s
                    running.append(task)
                    begun = True
        rates = [rate(place, task, running) for task in running]
        ahead = min(left[id(task)] / r for task, r in zip(running, rates, strict=True))
        now += ahead
        for task, r in zip(running, rates, strict=True):
            left[id(task)] -= ahead * r
            if left[id(task)] <= 1e-15 + 1e-12 * task.work_s:
                task.end_s = now
        running = [task for task in running if task.end_s < 0]
    return now


def is_resident_throughout(collective: Collective) -> bool:
    """Whether its kernels keep their SMs from its begin to its end, whatever they wait for."""
    return collective.resident_s >= collective.alone_s


def held_sm_s(tasks: list[Task]) -> float:
    held = 0.0
    for task in tasks:
        if task.collective and is_resident_throughout(task.collective):
            held += task.collective.ctas * (task.end_s - task.begin_s)
        elif task.collective:
            held += task.collective.sm_s
    return held


def resident_s(tasks: list[Task]) -> float:
    """Time in which some kernel of a collective is on an SM."""
    whole, part = [], 0.0
    for task in tasks:
        if task.collective and is_resident_throughout(task.collective):
            whole.append((task.begin_s, task.end_s))
        elif task.collective:
            part += task.collective.resident_s
    covered = until = 0.0
    for begin, end in sorted(whole):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered + part


def simulate(
    place: Place, model: Model, costs: list[GroupCost], tokens: int, sequence: int, recompute: bool
) -> Step:
    forward = compute_s(place, model, tokens, sequence)
    optimizer = place.known["optimizer"] / place.memory * model.numel / place.ranks
    tasks = Builder(model, costs, forward).build(3.0 if recompute else 2.0, optimizer)
    total = play(place, tasks)
    return Step(
        total,
        sum(task.work_s for task in tasks if task.stream == COMPUTE and not task.is_copy),
        sum(task.work_s for task in tasks if task.is_copy),
        held_sm_s(tasks),
        resident_s(tasks),
        sum(task.collective.rail_bytes for task in tasks if task.collective),
        tuple(tasks),
    )
