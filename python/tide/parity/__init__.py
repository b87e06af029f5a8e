"""`tide parity`: a user's own script, stock twice and on tide once, and whether tide's loss stays
within the distance of the two stock runs.

`rank` runs the script in each rank, `recorder` listens, `compare` judges, `runs` starts and
resumes, `show` writes and paints.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tide import look

if TYPE_CHECKING:
    from tide.parity.recorder import Recorder

current: Recorder | None = None
"""What listens in this rank, while `tide parity` runs it."""


def log(step: int, loss: float) -> None:
    """For scripts: tells `tide parity` a step's loss. Does nothing outside it."""
    if current is not None:
        current.add("callback", int(step), float(loss))


@click.command("parity")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="On this host.")
@click.option("--stock", default="", help="Backend of the stock runs  [default: the script's]")
@click.option("--also", default="", help="A fourth run: another backend's name, or symmmem.")
@click.option(
    "--seed",
    default=1,
    show_default=True,
    type=click.IntRange(0, (1 << 32) - 1),
    help="Of every run: random, numpy, torch, PYTHONHASHSEED.",
)
@click.option(
    "--window",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Steps of the moving mean, half of all at most.",
)
@click.option(
    "--from-step", type=click.IntRange(0), help="First step compared  [default: half of all]"
)
@click.option(
    "--out",
    default=Path("tide-parity"),
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of logs, results and the picture; runs that ended there are not repeated.",
)
@click.option("--again", is_flag=True, help="Repeats runs that ended in --out.")
@look.json_option
def command(
    script: Path,
    arguments: tuple[str, ...],
    ranks: int,
    stock: str,
    also: str,
    seed: int,
    window: int,
    from_step: int | None,
    out: Path,
    again: bool,
    as_json: bool,
) -> int:
    """Is it right: runs a training script three times by torchrun (stock, stock, tide) with one
    changed string and compares losses, step times and memory.

    The script logs its loss in any of these ways: a line with "loss 1.23" (and "step 7"), JSON
    lines (printed, or in a file *.jsonl), TensorBoard, or tide.parity.log(step, loss). Seeds are
    set before it starts. Options of the script go behind it, after --. Runs that ended are kept in
    --out: an interrupted call goes on with the next one. What changes besides script, options,
    TIDE_ variables and versions (data, imported modules) it cannot know: --again repeats all.

    \b
        tide parity train.py --ranks 8 -- --config small.toml

    Where the stock runs are bit-equal, a stock run that sums gradients in another order measures.
    Exit code 1 where tide is outside the distance of the stock runs.
    """
    from tide.parity import runs, show

    if not script.is_file():
        raise look.BadInput(f"there is no script {script}")
    look.folder(out)
    plan = runs.Plan(script, arguments, ranks, stock, also, seed, out, again)
    found, failures = runs.everything(plan)
    result = {**show.judged(found, window, from_step), "failed_runs": failures}
    show.save(result, found, out)
    if as_json:
        look.print_json(result)
    else:
        click.echo(show.text(result, out))
    return int(result["within"] is False)
