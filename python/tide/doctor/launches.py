"""Comparing the ranks of a torchrun launch: every rank sends its facts, rank 0 names what
differs."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import defaultdict
from datetime import timedelta
from typing import Any

from tide.look import BadInput

Facts = dict[str, Any]

OWN_TO_A_RANK = {
    "launch.rank",
    "launch.local rank",
    "host.shm free bytes",
    "environment.CUDA_VISIBLE_DEVICES",
}
OWN_TO_A_HOST = {"host.name", "host.boot", "launch.host"}
"""What differs without anything being wrong."""


def exchange(facts: Facts, rank: int, ranks: int, seconds: float) -> list[Facts | None]:
    """On rank 0 the facts of all ranks, None for those that sent none in time; elsewhere an empty
    list, once rank 0 has read (or its time is over).

    Raises BadInput where the launch names no store, or none can be reached."""
    store = store_of_launch(rank, seconds)
    store.set(f"facts/{rank}", json.dumps(facts))
    if rank != 0:
        with contextlib.suppress(RuntimeError, ValueError):
            store.wait(["done"], timedelta(seconds=seconds * 2))
            # The store ends with its host, rank 0, which waits for this word.
            store.add("left", 1)
        return []
    received: list[Facts | None] = []
    for other in range(ranks):
        try:
            store.wait([f"facts/{other}"], timedelta(seconds=seconds))
            received.append(json.loads(store.get(f"facts/{other}")))
        except (RuntimeError, ValueError):
            received.append(None)
            seconds = 1.0  # the others have had their time
    store.set("done", "1")
    answering = sum(one is not None for one in received) - 1
    for _ in range(50):
        if store.add("left", 0) >= answering:
            break
        time.sleep(0.1)
    return received


def store_of_launch(rank: int, seconds: float) -> Any:
    """torchrun's, or one that rank 0 serves. It waits for nobody, so that who is missing can be
    named."""
    import torch.distributed as dist

    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not address or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise BadInput(
            "WORLD_SIZE says that there are other ranks, but MASTER_ADDR and MASTER_PORT do not "
            "say where"
        )
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    patience = timedelta(seconds=seconds)
    try:
        store = dist.TCPStore(address, int(port), None, serves, patience, wait_for_workers=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise BadInput(
            f"the store of this launch, {address}:{port}, is out of reach: {why}"
        ) from None
    return dist.PrefixStore("tide-doctor/", store)


def differences(all_facts: list[Facts | None]) -> list[str]:
    """One sentence for each fact that ranks see differently, and for each rank that is missing."""
    sentences = []
    missing = [rank for rank, facts in enumerate(all_facts) if facts is None]
    if missing:
        sentences.append(f"{named(missing)} sent nothing: not started, or stuck before it")
    flat = {rank: flattened(facts) for rank, facts in enumerate(all_facts) if facts is not None}
    names = sorted({name for facts in flat.values() for name in facts})
    for name in names:
        if name in OWN_TO_A_RANK or name in OWN_TO_A_HOST:
            continue
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, facts in flat.items():
            by_value[str(facts.get(name, "not set"))].append(rank)
        if len(by_value) > 1:
            parts = [f"{value} on {named(ranks)}" for value, ranks in by_value.items()]
            sentences.append(f"{name}: {'; '.join(parts)}")
    return sentences + uneven_hosts(flat)


def uneven_hosts(flat: dict[int, Facts]) -> list[str]:
    """tide serves a group only where every host brings equally many ranks."""
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, facts in flat.items():
        members[(facts.get("host.name", "?"), facts.get("host.boot", "?"))].append(rank)
    if len({len(ranks) for ranks in members.values()}) < 2:
        return []
    parts = [f"{name} has {len(ranks)}" for (name, _), ranks in members.items()]
    return [f"hosts bring different numbers of ranks ({', '.join(parts)}): groups go stock"]


def flattened(value: Any, name: str = "") -> Facts:
    if isinstance(value, dict):
        result: Facts = {}
        for key, inner in value.items():
            result |= flattened(inner, f"{name}.{key}" if name else str(key))
        return result
    if name == "gpus.devices":
        # Ranks may see other cards of one kind.
        return {name: [{k: v for k, v in d.items() if k != "uuid"} for d in value]}
    return {name: value}


def named(ranks: list[int]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
