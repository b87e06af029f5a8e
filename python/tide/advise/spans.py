"""Arithmetic on sets of time spans: arrays of shape (n, 2), begin and end."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Spans = NDArray[np.float64]
EMPTY: Spans = np.zeros((0, 2))


def union(spans: Any) -> Spans:
    """The same time as disjoint spans in order."""
    spans = np.asarray(spans, dtype=np.float64).reshape(-1, 2)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    starts = np.concatenate(([True], spans[1:, 0] > ends[:-1]))
    last = np.concatenate((np.flatnonzero(starts)[1:] - 1, [len(spans) - 1]))
    return np.stack((spans[starts, 0], ends[last]), axis=1)


def length(spans: Spans) -> float:
    """Of disjoint spans."""
    return float((spans[:, 1] - spans[:, 0]).sum())


def intersection(a: Spans, b: Spans) -> Spans:
    """Of two sets of disjoint spans in order."""
    if not len(a) or not len(b):
        return EMPTY
    # Cut both at all ends: a piece belongs to both sets or to none.
    cuts = np.unique(np.concatenate((a.ravel(), b.ravel())))
    middle = (cuts[:-1] + cuts[1:]) / 2
    both = covers(a, middle) & covers(b, middle)
    return union(np.stack((cuts[:-1][both], cuts[1:][both]), axis=1))


def difference(a: Spans, b: Spans) -> Spans:
    """What of `a` is not in `b`."""
    if not len(a) or not len(b):
        return a
    cuts = np.unique(np.concatenate((a.ravel(), b.ravel())))
    middle = (cuts[:-1] + cuts[1:]) / 2
    only = covers(a, middle) & ~covers(b, middle)
    return union(np.stack((cuts[:-1][only], cuts[1:][only]), axis=1))


def covers(spans: Spans, times: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Whether each time lies in one of the disjoint spans."""
    if not len(spans):
        return np.zeros(len(times), dtype=bool)
    at = np.searchsorted(spans[:, 0], times, side="right") - 1
    return np.asarray((at >= 0) & (times < spans[np.maximum(at, 0), 1]), dtype=bool)


def innermost(spans: Spans, times: NDArray[np.float64]) -> NDArray[np.int64]:
    """For each time the index of the shortest span around it, -1 for none. Spans may nest."""
    found = np.full(len(times), -1, dtype=np.int64)
    order = np.argsort(times, kind="stable")
    ordered = times[order]
    # Longest first, so that shorter ones overwrite.
    for index in np.argsort(spans[:, 0] - spans[:, 1], kind="stable"):
        begin, end = np.searchsorted(ordered, spans[index])
        found[order[begin:end]] = index
    return found


def clipped(spans: Spans, begin: float, end: float) -> Spans:
    return union(np.clip(spans, begin, end))
