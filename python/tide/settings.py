"""Settings that choose what a call does must be equal on all ranks of a group: compared when the
group is made.

Each rank compares its own with those of whichever rank came first, tells all of a difference, and
waits until every rank has compared: so all of them raise the same error, before any could wait for
another in a different operation.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch.distributed as dist

from tide.options import FIELDS

# Limits of memory, what is shown, what is voted about, and what each host calls its devices and
# files.
MAY_DIFFER = ("arena_limit_bytes", "flight_record_size", "multicast", "rails", "ucx_library")
COMPARED = {field: knob for field, knob in FIELDS.items() if field not in MAY_DIFFER}

_FIRST, _DIFFERENCE, _COMPARED_BY = "settings/first", "settings/difference", "settings/compared"


def agree(store: dist.Store, rank: int, size: int, options: Any) -> None:
    """Collective over the group's ranks. Raises ValueError naming the knob, the ranks and both
    values, the same on all ranks; TimeoutError naming the ranks that did not come."""
    own = {"rank": rank, **{field: getattr(options, field) for field in COMPARED}}
    first = json.loads(store.compare_set(_FIRST, "", json.dumps(own)))
    for field, knob in COMPARED.items():
        if own[field] != first[field]:
            sentence = (
                f"{knob} (tide.Options.{field}) differs between the ranks of group "
                f"'{options.group_name}': rank {first['rank']} has {first[field]!r}, rank {rank} "
                f"has {own[field]!r}; set it alike on all ranks"
            )
            store.compare_set(_DIFFERENCE, "", sentence)
            break
    store.set(f"{_COMPARED_BY}/{rank}", "1")
    store.add(_COMPARED_BY, 1)
    _wait_for_all(store, size, options)
    if store.check([_DIFFERENCE]):
        raise ValueError(store.get(_DIFFERENCE).decode())


def _wait_for_all(store: dist.Store, size: int, options: Any) -> None:
    until = time.monotonic() + options._timeout.total_seconds()
    pause = 0.0005
    while store.add(_COMPARED_BY, 0) < size:
        if time.monotonic() >= until:
            missing = [r for r in range(size) if not store.check([f"{_COMPARED_BY}/{r}"])]
            raise TimeoutError(
                f"ranks {missing} of group '{options.group_name}' did not come to make it within "
                f"{options._timeout.total_seconds():g} s"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.02)
