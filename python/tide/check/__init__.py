"""`tide check`: which groups of a user's model tide would serve, slots, memory and reasons, without
training, peers or a GPU.

`stage` runs the script in a process of its own up to the first forward; `verdict` asks the real
planning there.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from tide import look, units

Json = dict[str, Any]


@click.command("check")
@click.argument("target")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option("--ranks", default=8, show_default=True, type=click.IntRange(2), help="Of the run.")
@click.option("--local-ranks", type=click.IntRange(1), help="Ranks a host  [default: all]")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="Where the run would train.",
)
@click.option(
    "--timeout",
    default=600.0,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds the script may take.",
)
@look.json_option
def command(
    target: str,
    arguments: tuple[str, ...],
    ranks: int,
    local_ranks: int | None,
    device: str,
    timeout: float,
    as_json: bool,
) -> int:
    """Which FSDP2 groups of a model tide would serve, their slots, memory, and reasons why not.

    TARGET is a training script, or module:function where the function returns a model that went
    through fully_shard. It runs as rank 0 of --ranks up to its model's first forward: parameters
    stay on the meta device, so a model of any size fits a laptop; nothing is trained or sent.
    Options of the script go behind it, after --.

    \b
        tide check train.py --ranks 64 --local-ranks 8 -- --config small.toml
        tide check mypackage.models:build_sharded --ranks 8

    Exit code 1 where no group would be served.
    """
    if ":" not in target and not Path(target).is_file():
        raise look.BadInput(f"there is no script {target}")
    local = local_ranks or ranks
    if ranks % local:
        raise look.BadInput(f"{ranks} ranks cannot be cut into hosts of {local}")
    settings = {"ranks": ranks, "local_ranks": local, "device": device}
    found = staged(target, arguments, settings, timeout)
    if "failure" in found:
        raise look.BadInput(f"{target} cannot be checked: {found['failure']}")
    if as_json:
        look.print_json({**found, **settings})
    else:
        click.echo(text(found, settings))
    return int(all(row["path"] == "stock" for row in found["groups"]))


def staged(target: str, arguments: tuple[str, ...], settings: Json, timeout: float) -> Json:
    with tempfile.TemporaryDirectory(prefix="tide-check-") as name:
        result, log = Path(name) / "result.json", Path(name) / "log"
        play = [sys.executable, "-m", "tide.check.stage", json.dumps(settings), str(result)]
        with look.progress(f"running {target} up to its first forward") as shown:
            with look.Child(
                [*play, target, *arguments], {"CUDA_VISIBLE_DEVICES": ""}, log
            ) as child:
                waited = 0.0
                while (status := child.wait(0.2)) is None:
                    waited += 0.2
                    shown.update()
                    if waited > timeout:
                        return {"failure": f"no forward in {timeout:.0f} seconds (--timeout)"}
        said = log.read_text(errors="replace").strip().splitlines()
        words = f"; its last words: {said[-1].strip()[:300]}" if said else ""
        if not result.is_file():
            return {"failure": f"its process ended with {status}{words}"}
        answer: Json = json.loads(result.read_text())
        if answer.get("failure", "").startswith("it ended"):
            answer["failure"] += words
        return answer


def text(found: Json, settings: Json) -> str:
    from tide.fsdp.report import Row, table

    rows = [Row(**row) for row in found["groups"]]
    lines = table(rows)
    served = sum(row.path != "stock" for row in rows)
    lines.append(
        f"{served} of {len(rows)} groups on tide with {settings['ranks']} ranks on "
        f"{settings['device']}, {found['parameters']:,} parameters, torch {found['torch']}"
    )
    for ring in found["rings"]:
        if ring["slots"]:
            lines.append(
                f"ring of {ring['slots']} slots of {units.size(ring['slot_bytes'])} (prefetch "
                f"depth {ring['prefetch_depth']})"
            )
    lines.append(
        f"arena: {units.size(found['arena_bytes'])} a rank, unsharded parameters included; stock "
        f"buffers beside them: {units.size(found['stock_buffer_bytes'])}"
    )
    return "\n".join(lines)
