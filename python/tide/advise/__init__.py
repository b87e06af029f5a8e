"""`tide advise`: what communication costs and what tide could win, from traces of any FSDP2 run.

`stream` reads, `collect` keeps a few numbers, `measure` adds spans up, `estimate` judges.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tide import look


@click.command("advise")
@click.argument("traces", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--threshold",
    default=3.0,
    show_default=True,
    type=click.FloatRange(0, 100),
    help="Per cent of a step from which it is worth it.",
)
@click.option("--parameters", type=click.FloatRange(min=1), help="Of the model, in all.")
@click.option("--active", type=click.FloatRange(min=1), help="Parameters a token meets [all].")
@click.option("--tokens", type=click.FloatRange(min=1), help="Tokens a GPU in one step.")
@click.option("--out", type=click.Path(path_type=Path), help="Paints the step here (png, svg).")
@look.json_option
def command(
    traces: tuple[Path, ...],
    threshold: float,
    parameters: float | None,
    active: float | None,
    tokens: float | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """What tide could win: reads torch.profiler traces of an FSDP2 run.

    TRACES are chrome traces (json or json.gz, any size, torch 2.11 to 2.15, GPU or CPU), one a
    rank; a folder stands for the traces in it. Says what layout copies, communication kernels and
    exposed waiting cost a step and a module, what tide could win at most and is expected to win,
    what it would not serve, and whether it is worth it.

    \b
        tide advise traces/rank0.pt.trace.json.gz --out step.png
        tide advise traces/ --parameters 70e9 --tokens 8192
    """
    from tide.advise import estimate, text

    if out is not None:
        look.picture(out)
    given = [threshold, *(one for one in (parameters, active, tokens) if one is not None)]
    if not all(map(math.isfinite, given)):
        raise look.BadInput("--threshold, --parameters, --active and --tokens are finite numbers")
    if ((active or tokens) and not parameters) or (parameters and not tokens):
        raise look.BadInput("--parameters and --tokens belong together (--active is optional)")
    measured = [read(path) for path in files(traces)]
    slowest = max(measured, key=lambda one: (one.fsdp2, one.step))
    won = estimate.gain(slowest)
    answer, sentence = estimate.verdict(slowest, won, threshold / 100)
    refused = estimate.not_served(slowest)
    by_size = None
    if parameters and tokens:
        by_size = estimate.ratio_shares(parameters, active or parameters, tokens)
    if out is not None:
        from tide.advise import picture

        picture.paint(slowest, won, out)
    if as_json:
        ranks = [{k: v for k, v in asdict(one).items() if k != "lanes"} for one in measured]
        result: dict[str, Any] = {
            "verdict": answer,
            "sentence": sentence,
            "threshold": threshold / 100,
            "gain": asdict(won),
            "share_by_size": by_size,
            "not_served": refused,
            "ranks": ranks,
        }
        look.print_json(result)
        return 0
    click.echo(text.report(slowest, won, sentence, refused))
    if len(measured) > 1:
        click.echo(text.ranks(measured))
    if by_size:
        click.echo(
            f"by size (parameters / (active x tokens)): {by_size[0]:.1%} to {by_size[1]:.1%} of a "
            "step"
        )
    return 0


def files(traces: tuple[Path, ...]) -> list[Path]:
    found: list[Path] = []
    for path in traces:
        if path.is_dir():
            inside = sorted([*path.glob("*.json"), *path.glob("*.json.gz")])
            if not inside:
                raise look.BadInput(f"no trace (*.json, *.json.gz) in {path}")
            found += inside
        elif not path.is_file():
            raise look.BadInput(f"there is no trace {path}")
        else:
            found.append(path)
    return found


def read(path: Path) -> Any:
    from tide.advise import collect, measure, stream

    with look.progress(f"reading {path.name}") as shown:
        with stream.Trace(path, shown.update) as trace:
            return measure.measure(collect.collect(trace))
