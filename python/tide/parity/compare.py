"""Whether a run's loss stays within the distance of two stock runs. Pure.

The procedure: the mean of the losses over a moving window, from half of the steps to the end; a
run's distance is the largest relative difference from the first stock run there.

    50 steps' means over steps 500 to 1000: tide at most 0.4 % from the first stock run, the second
    stock run 0.6 %: within.

Two stock runs that are bit-equal have no distance; then a stock run whose gradients are divided
first and summed in another order of ranks is the yardstick. Where that is equal too (two ranks:
a + b = b + a, and a half is exact) there is none, and nothing is divided by it.

A difference of less than a millionth is rounding of the loss itself (fp32 has seven digits), and is
within whatever the yardstick.

A loss that is not finite where that of the stock runs is, and a run that ends before them, are
outside, however near the other steps are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

Losses = dict[int, float]
ROUNDING = 1e-6


@dataclass(frozen=True)
class Verdict:
    within: bool | None  # None: no yardstick
    distance: float
    yardstick: float
    sentence: str


def moving_means(losses: Losses, window: int, first: int) -> Losses:
    """At each step from `first` on the mean of the last `window` logged losses."""
    steps = sorted(losses)
    return {
        step: sum(losses[one] for one in steps[at + 1 - window : at + 1]) / window
        for at, step in enumerate(steps)
        if at + 1 >= window and step >= first
    }


def distance(run: Losses, reference: Losses, window: int, first: int) -> float:
    """The largest relative difference of the moving means where both have one; 0 for none.
    Infinite where a mean is not finite."""
    if run == reference:
        return 0.0
    mine, other = (moving_means(one, window, first) for one in (run, reference))
    return max((relative(mine[s], other[s]) for s in mine.keys() & other.keys()), default=0.0)


def relative(value: float, reference: float) -> float:
    apart = abs(value - reference) / max(abs(reference), 1e-12)
    return apart if math.isfinite(apart) else math.inf


def not_finite(losses: Losses) -> int | None:
    """The first step whose loss is not finite."""
    return min((step for step, loss in losses.items() if not math.isfinite(loss)), default=None)


def incomparable(runs: dict[str, Losses], name: str, yardsticks: tuple[str, ...]) -> Verdict | None:
    """A verdict where arithmetic has nothing to say."""
    for stock in ("stock 1", *yardsticks):
        step = not_finite(runs[stock])
        if step is not None:
            why = f"the loss of {stock} is not finite at step {step}: nothing can be compared"
            return Verdict(None, math.inf, math.inf, why)
    step = not_finite(runs[name])
    if step is not None:
        why = f"the loss of {name} is not finite at step {step}, that of the stock runs is: outside"
        return Verdict(False, math.inf, 0.0, why)
    ends = {max(runs[stock]) for stock in ("stock 1", *yardsticks)}
    if max(runs[name]) < min(ends):
        why = f"{name} ended at step {max(runs[name])}, the stock runs at {min(ends)}: outside"
        return Verdict(False, math.inf, 0.0, why)
    return None


def judge(
    runs: dict[str, Losses], name: str, yardsticks: tuple[str, ...], window: int, first: int
) -> Verdict:
    """`runs` holds "stock 1" and those named."""
    refused = incomparable(runs, name, yardsticks)
    if refused is not None:
        return refused
    reference = runs["stock 1"]
    own = distance(runs[name], reference, window, first)
    for yardstick in yardsticks:
        far = distance(runs[yardstick], reference, window, first)
        if far > 0:
            within = own <= max(far, ROUNDING)
            said = "within" if within else "outside"
            if within and own > far:
                said = "a matter of rounding, within"
            return Verdict(
                within, own, far,
                f"{name} is at most {own:.2e} from stock 1, {yardstick} {far:.2e}: {said} the "
                "distance of stock runs",
            )  # fmt: skip
    if own == 0:
        return Verdict(True, 0.0, 0.0, f"{name} is bit-equal to stock, as are all stock runs")
    return Verdict(
        True if own <= ROUNDING else None, own, 0.0,
        f"{name} is at most {own:.2e} from stock 1; all stock runs are bit-equal, so there is no "
        "yardstick",
    )  # fmt: skip
