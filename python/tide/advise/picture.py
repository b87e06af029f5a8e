"""The picture of `tide advise`: one step as lanes, and what of it tide could win."""

from __future__ import annotations

from pathlib import Path

from tide.advise.estimate import Gain
from tide.advise.measure import Measured
from tide.look import COLOURS, figure

LANE_COLOURS = {"layout copies": COLOURS["bad"], "computing": COLOURS["other"]}


def paint(measured: Measured, won: Gain, path: Path) -> None:
    with figure(path, 11, 5) as drawn:
        above, below = drawn.subplots(2, 1, height_ratios=[max(2, len(measured.lanes)), 1.4])
        for row, (name, own) in enumerate(measured.lanes.items()):
            colour = LANE_COLOURS.get(name, COLOURS["stock"])
            above.broken_barh([(a, b - a) for a, b in own], (row - 0.35, 0.7), color=colour)
        above.set_yticks(range(len(measured.lanes)), list(measured.lanes))
        above.invert_yaxis()
        above.set_xlabel("seconds of the median step")
        above.set_title("where a step goes", loc="left", fontweight="bold")
        left = 0.0
        parts = [
            ("copies nothing hides", won.copies, COLOURS["bad"]),
            ("exposed waiting", won.waiting, COLOURS["stock"]),
            ("SM time taken from others", won.contention, "#a9d6dc"),
        ]
        step = measured.step or 1.0
        for name, seconds, colour in parts:
            below.barh([0], [seconds / step * 100], left=left, color=colour, label=name)
            left += seconds / step * 100
        below.barh([1], [won.expected / step * 100], color=COLOURS["tide"], label="expected")
        below.set_yticks([0, 1], ["at most", "expected"])
        below.set_xlabel("per cent of a step")
        below.legend(frameon=False, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.55))
