"""`tide doctor` for people: facts, ladders and knobs as lines of at most 100 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from tide.doctor.knob_table import KnobState
from tide.doctor.paths import Ladder
from tide.look import WIDTH
from tide.units import size

Facts = dict[str, Any]


def report(
    facts: Facts, ladders: Sequence[Ladder], knobs: Sequence[KnobState], differences: list[str]
) -> str:
    lines = section("versions", [f"{k}: {v or 'none'}" for k, v in facts["versions"].items()])
    lines += section("host", host_lines(facts["host"]))
    lines += section("GPUs", gpu_lines(facts["gpus"]))
    lines += section("network", network_lines(facts["network"]))
    if facts["environment"]:
        lines += section(
            "variables of others", [f"{k}={v}" for k, v in facts["environment"].items()]
        )
    for ladder in ladders:
        lines += section(ladder.traffic, ladder_lines(ladder))
    lines += section("knobs", knob_lines(knobs))
    ranks = facts["launch"].get("ranks", 1)
    if ranks > 1:
        alike = [f"{ranks} ranks, alike in everything that matters"]
        lines += section("ranks", differences or alike)
    return "\n".join(lines)


def section(title: str, lines: Sequence[str]) -> list[str]:
    wrapped = [title]
    for line in lines:
        depth = len(line) - len(line.lstrip())
        wrapped += textwrap.wrap(
            line.strip(),
            WIDTH,
            initial_indent=" " * (2 + depth),
            subsequent_indent=" " * (6 + depth),
            break_on_hyphens=False,
        )
    return wrapped


def host_lines(host: Facts) -> list[str]:
    limited = host["memory limit bytes"]
    memory = size(host["memory bytes"]) + (f", limited to {size(limited)}" if limited else "")
    shm = f"{size(host['shm free bytes'])} free of {size(host['shm bytes'])}"
    memlock = host["memlock"]
    return [
        f"{host['name']}: {host['cores']} cores, {memory}",
        f"shared memory (/dev/shm): {shm if host['shm bytes'] else 'none'}",
        f"locked memory: {memlock if memlock == 'unlimited' else size(memlock)}; open files: "
        f"{host['open files']} (may be raised to {host['open files, hard']})",
    ]


def gpu_lines(gpus: Facts) -> list[str]:
    if not gpus["devices"]:
        return [gpus["none"]]
    lines = []
    for index, device in enumerate(gpus["devices"]):
        features = [
            name
            for name in ("multicast", "fabric handles", "dma-buf", "stream wait values")
            if device.get(name)
        ]
        links = gpus["nvlinks"][index] if gpus["nvlinks"] else 0
        compute = f"{device['compute major']}.{device['compute minor']}"
        lines.append(
            f"{index}: {device['name']}, {size(device['memory bytes'])}, compute {compute}, "
            f"{device['multiprocessors']} SMs, {links} NVLinks, {', '.join(features)}"
        )
    for row, peers in enumerate(gpus["peer access"]):
        closed = [str(i) for i, open_ in enumerate(peers) if not open_]
        if closed:
            lines.append(f"{row} cannot write the memory of {', '.join(closed)}")
    lines.append(f"IMEX channels: {gpus['imex channels']}")
    return lines


def network_lines(network: Facts) -> list[str]:
    lines = [
        f"{p['device']}: {p['state']}, {p['rate']}, {p['kind']}, NUMA node {p['numa node']}"
        for p in network["rdma ports"]
    ] or ["no RDMA ports"]
    names = [
        i["name"] + (f" ({i['mbit/s']} Mbit/s)" if i["mbit/s"] else "")
        for i in network["interfaces"]
    ]
    lines.append(f"interfaces: {', '.join(names) or 'none but lo'}")
    return lines


def ladder_lines(ladder: Ladder) -> list[str]:
    taken = ladder.taken
    lines = [f"taken: {taken.path if taken else 'none'}"]
    told: set[str] = set()
    for rung in ladder.better:
        lines.append(f"better: {rung.path}")
        for obstacle in rung.obstacles:
            if obstacle.why in told:
                lines.append(f"  why not: {obstacle.why}")
            else:
                lines.append(f"  why not: {obstacle.why}; change: {obstacle.change}")
            told.add(obstacle.why)
    return lines


def knob_lines(knobs: Sequence[KnobState]) -> list[str]:
    width = max(len(knob.name) for knob in knobs)
    values = max(len(knob.value) for knob in knobs)
    lines = []
    for knob in knobs:
        origin = "default" if knob.origin == "default" else f"{knob.origin}; default {knob.default}"
        lines.append(f"{knob.name:<{width}}  {knob.value:<{values}}  ({origin})")
        if knob.problem:
            lines.append(f"  {knob.problem}")
    return lines
