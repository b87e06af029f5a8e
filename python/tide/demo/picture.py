"""Paints the demonstration's result: losses, where a step's time goes, layout copies, bytes."""

from pathlib import Path
from typing import Any

from tide import look
from tide.demo.training import Result

COLORS = {"gloo": "#d1495b", "tide": "#00798c"}
PARTS = {"computing": "#8d99ae", "communication": "#edae49", "optimizer": "#c9cfd8"}


def paint(results: list[Result], world: int, path: Path) -> None:
    """Writes a PNG of three panels to `path`."""
    from matplotlib import rc_context

    titles: Any = {
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.titlepad": 14,
    }
    with look.figure(path, 14, 4.6, dpi=140) as figure, rc_context(titles):
        left, middle, right = figure.subplots(1, 3, width_ratios=[1.35, 1, 1])
        losses(left, results)
        step_times(middle, results)
        copies(right, results)
        names = " and ".join(result.backend for result in results)
        figure.suptitle(
            f"One string changed: FSDP2 on {names}, {world} ranks",
            x=0.008,
            ha="left",
            fontsize=15,
            fontweight="bold",
        )


def color(result: Result) -> str:
    return COLORS.get(result.backend, "#555555")


def losses(axes: Any, results: list[Result]) -> None:
    for index, result in enumerate(results):
        axes.plot(
            result.losses,
            color=color(result),
            linewidth=4.5 if index == 0 else 1.8,
            alpha=0.45 if index == 0 and len(results) > 1 else 1,
            label=f"{result.backend}: {result.losses[-1]:.3f} at the end",
        )
    axes.set(title="The same losses", xlabel="step", ylabel="cross entropy, nats a byte")
    axes.legend(frameon=False)


def step_times(axes: Any, results: list[Result]) -> None:
    names = [result.backend for result in results]
    communication = [result.communication_time() for result in results]
    optimizer = [result.optimizer_time() for result in results]
    whole = [result.step_time() for result in results]
    computing = [w - c - o for w, c, o in zip(whole, communication, optimizer, strict=True)]
    bottom = [0.0] * len(results)
    parts = {"computing": computing, "optimizer": optimizer, "communication": communication}
    for name, values in parts.items():
        axes.bar(names, values, 0.55, bottom=bottom, label=name, color=PARTS[name])
        for index, value in enumerate(values):
            if value > 0.05 * max(whole):
                axes.text(
                    index, bottom[index] + value / 2, f"{value:.0f}", ha="center", va="center"
                )
        bottom = [b + v for b, v in zip(bottom, values, strict=True)]
    for index, value in enumerate(whole):
        axes.text(index, value, f"{value:.0f} ms", ha="center", va="bottom", fontweight="bold")
    axes.set(title="Where a step's time goes", ylabel="ms, median", ylim=(0, max(whole) * 1.28))
    axes.legend(
        frameon=False, loc="upper right", ncols=3, fontsize=9, columnspacing=1, handlelength=1
    )


def copies(axes: Any, results: list[Result]) -> None:
    kinds = list(results[0].copies)
    height = 0.8 / len(results)
    for index, result in enumerate(results):
        at = [row + index * height for row in range(len(kinds))]
        counts = [result.copies[kind] for kind in kinds]
        axes.barh(at, counts, height * 0.9, color=color(result), label=result.backend)
        for y, count in zip(at, counts, strict=True):
            axes.text(count, y, f" {count}", va="center", color=color(result), fontweight="bold")
    middle = (len(results) - 1) * height / 2
    axes.set_yticks([row + middle for row in range(len(kinds))], kinds)
    axes.invert_yaxis()
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(title="Layout copies in one step", xlabel="calls seen by torch's profiler")
    axes.set_xlim(
        0, 1.15 * max(1, *(count for result in results for count in result.copies.values()))
    )
    axes.legend(frameon=False)
