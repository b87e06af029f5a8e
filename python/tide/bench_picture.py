"""Paints what `tide bench` measured: how many times faster than gloo, and where the savings come
from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tide import look

Rows = list[tuple[str, float, float, float | None]]
SHADES = ["#00798c", "#5fb3bf", "#a9d6dc", "#edae49"]


def paint(report: dict[str, Any], compared: Callable[[dict[str, Any]], Rows], path: Path) -> bool:
    """Writes a PNG to `path`; False when nothing was compared."""
    rows = {ranks: compared(result) for ranks, result in report["ranks"].items()}
    names = [row[0] for row in next(iter(rows.values()), [])]
    if not names:
        return False
    with look.figure(path, 10, 1.4 + 0.75 * len(names)) as drawn:
        axes = drawn.subplots()
        height = 0.8 / len(rows)
        longest = 1.0
        for index, (ranks, one) in enumerate(rows.items()):
            ratios = [gloo / tide for _, gloo, tide, _ in one]
            longest = max(longest, *ratios)
            at = [row + index * height for row in range(len(one))]
            axes.barh(
                at, ratios, height * 0.92, color=SHADES[index % len(SHADES)], label=f"{ranks} ranks"
            )
            for y, ratio, (_, gloo, tide, _) in zip(at, ratios, one, strict=True):
                axes.text(
                    ratio,
                    y,
                    f"  {ratio:.1f} x  ({gloo:.1f} / {tide:.1f} ms)",
                    va="center",
                    fontsize=9,
                )
        axes.axvline(1, color="#555555", linewidth=1)
        axes.set_yticks([row + height * (len(rows) - 1) / 2 for row in range(len(names))], names)
        axes.invert_yaxis()
        axes.set_xlim(0, longest * 1.35)
        axes.set_xlabel("times faster than gloo (medians, one run)")
        axes.set_title("tide beside gloo", loc="left", fontweight="bold", fontsize=14, pad=14)
        axes.legend(frameon=False, loc="lower right")
        machine = report["machine"]
        note = (
            f"{machine['processor']}, {machine['cores']} cores; torch {report['versions']['torch']}"
        )
        axes.text(1, 1.02, note, ha="right", fontsize=9, color="#777777", transform=axes.transAxes)
    return True
