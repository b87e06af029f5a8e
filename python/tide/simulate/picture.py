"""A few blocks of stock's step above those of tide's, and what a step costs beyond computing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tide import look
from tide.simulate.run import Answer, Question
from tide.simulate.step import COMPUTE, STREAMS, Task

BLOCKS_SHOWN = 4
COLOURS = {
    "forward": "#8ab6d6",
    "backward": "#5a8fbb",
    "optimizer": "#8d96a3",
    "layout copy": look.COLOURS["bad"],
    "gather": look.COLOURS["tide"],
    "reduce": look.COLOURS["stock"],
}


def middle_of_backward(tasks: tuple[Task, ...]) -> tuple[float, float]:
    """From one block's backward to that of a few blocks later."""
    backward = [task for task in tasks if task.name == "backward"]
    first = len(backward) // 2
    last = min(first + BLOCKS_SHOWN, len(backward) - 1)
    return backward[first].begin_s, backward[last].end_s


def paint(question: Question, found: list[Answer], path: Path) -> None:
    shown = [one for one in found if one.system in ("stock", "tide")]
    gpus = question.nodes * question.local_ranks
    windows = [middle_of_backward(one.step.tasks) for one in shown]
    width = max(end - begin for begin, end in windows)
    handles: dict[str, Any] = {}
    with look.figure(path, 12, 6) as drawn:
        grid = drawn.add_gridspec(2, 2, width_ratios=(3, 1))
        for row, (one, (begin, _)) in enumerate(zip(shown, windows, strict=True)):
            axes = drawn.add_subplot(grid[row, 0])
            handles.update(lanes(axes, one, begin, width))
        axes.set_xlabel("ms")
        bars(drawn.add_subplot(grid[:, 1]), found)
        drawn.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6)
        drawn.suptitle(
            f"{question.model.name}, {question.tokens} tokens a GPU, {gpus} GPUs "
            f"({question.cluster.name}): simulated",
            fontsize=13,
        )


def lanes(axes: Any, one: Answer, begin: float, width: float) -> dict[str, Any]:
    """Handles for the legend, by name."""
    handles: dict[str, Any] = {}
    for task in one.step.tasks:
        if task.end_s < begin or task.begin_s > begin + width:
            continue
        name = "layout copy" if task.is_copy else task.name
        handles[name] = axes.barh(
            STREAMS.index(task.stream),
            (task.end_s - task.begin_s) * 1e3,
            left=(task.begin_s - begin) * 1e3,
            height=0.8 if task.stream == COMPUTE else 0.6,
            color=COLOURS[name],
            edgecolor="white",
            linewidth=0.5,
        )
    axes.set_yticks(range(len(STREAMS)), STREAMS)
    axes.set_xlim(0, width * 1e3)
    axes.invert_yaxis()
    axes.set_title(f"{one.system}: a few blocks of the backward", fontsize=11)
    return handles


def bars(axes: Any, found: list[Answer]) -> None:
    names = [one.system.replace(", ", ",\n") for one in found]
    copies = [one.step.copies_s * 1e3 for one in found]
    others = [(one.step.exposed_s - one.step.copies_s) * 1e3 for one in found]
    axes.bar(names, copies, color=COLOURS["layout copy"], label="layout copies")
    axes.bar(names, others, bottom=copies, color=COLOURS["optimizer"], label="waiting, slowed")
    axes.set_title("what a step costs\nbeyond computing, ms", fontsize=11)
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=9)
