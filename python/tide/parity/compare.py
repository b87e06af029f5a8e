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
"""

from __future__ import annotations

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
    result = {}
    total = 0.0
    for at, step in enumerate(steps):
        total += losses[step]
        if at >= window:
            total -= losses[steps[at - window]]
        if at + 1 >= window and step >= first:
            result[step] = total / window
    return result


def distance(run: Losses, reference: Losses, window: int, first: int) -> float:
    """The largest relative difference of the moving means where both have one; 0 for none."""
    if run == reference:
        return 0.0
    mine, other = (moving_means(one, window, first) for one in (run, reference))
    common = mine.keys() & other.keys()
    return max((abs(mine[s] - other[s]) / max(abs(other[s]), 1e-12) for s in common), default=0.0)


def judge(
    runs: dict[str, Losses], name: str, yardsticks: tuple[str, ...], window: int, first: int
) -> Verdict:
    """`runs` holds "stock 1" and those named."""
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
