"""`tide simulate`: a model's step on a cluster that is described, in virtual time, without a GPU.

`clusters` and `models` say what runs where, `systems` prices collectives (tide's by the programs
that the engine runs), `step` lays out a step, `paper` holds predictions beside the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import click

from tide import look

CLUSTERS = "dgx-h200, dgx-h100, gb200, one-gpu, no-multicast, emulated, or a .yaml file."
MODELS = "llama-8b, llama-70b, qwen3-30b-a3b, wan-14b, module:function, or script.py:function."


Decorated = TypeVar("Decorated", bound=Callable[..., object])


def choice(name: str, *values: str, text: str) -> Callable[[Decorated], Decorated]:
    """An option that takes one of these; the first is the default."""
    return click.option(
        name, default=values[0], show_default=True, type=click.Choice(values), help=text
    )


@click.command("simulate")
@click.option("--cluster", "cluster_name", default="dgx-h200", show_default=True, help=CLUSTERS)
@click.option("--gpus", default=64, show_default=True, type=int, help="In all.")
@click.option("--model", "model_name", default="llama-70b", show_default=True, help=MODELS)
@click.option("--tokens", default=8192, show_default=True, type=click.IntRange(1), help="A GPU.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens that attend to each other [all].")
@click.option("--active", type=click.IntRange(1), help="Parameters of a block that a token meets.")
@click.option("--recompute", is_flag=True, help="The backward repeats the forward.")
@choice("--schedule", "best", "doubling", "ring", "direct", text="Of tide's gathers.")
@choice("--reduce-dtype", "fp32", "bf16", text="Stock's; tide adds in fp32.")
@choice("--nccl", "auto", "ring", "nvls", text="Stock's; auto: ring up to 512 ranks.")
@choice("--memory-mode", "in_place", "slot_reuse", text="tide's.")
@click.option("--out", type=click.Path(path_type=Path), help="Paints a timeline here (png, svg).")
@click.option("--paper", "show_paper", is_flag=True, help="The paper's numbers and predictions.")
@click.option("--constants", "show_constants", is_flag=True, help="What predictions stand on.")
@look.json_option
def command(
    cluster_name: str,
    gpus: int,
    model_name: str,
    tokens: int,
    sequence: int | None,
    active: int | None,
    recompute: bool,
    schedule: str,
    reduce_dtype: str,
    nccl: str,
    memory_mode: str,
    out: Path | None,
    show_paper: bool,
    show_constants: bool,
    as_json: bool,
) -> int:
    """A training step of FSDP2 on a cluster, simulated: stock, SymmMem and tide.

    tide's collectives are its own programs, run in virtual time; the others are formulas. Needs no
    GPU.

    \b
        tide simulate --model llama-70b --tokens 8192 --gpus 64 --out step.png
        tide simulate --cluster mine.yaml --model mymodels:build --gpus 256
        tide simulate --paper
    """
    from tide.simulate import clusters, models, paper, run, text

    if show_constants:
        text.show_constants(as_json)
        return 0
    if show_paper:
        paper.show(as_json)
        return 0
    if out is not None:
        look.picture(out)
    cluster = clusters.find(cluster_name)
    nodes, local_ranks = clusters.nodes_of(cluster, gpus)
    model = models.find(model_name)
    if active is not None:
        groups = tuple(g if g.is_root else replace(g, active=active) for g in model.groups)
        model = replace(model, groups=groups)
    question = run.Question(
        cluster,
        nodes,
        local_ranks,
        model,
        tokens,
        min(sequence or tokens, tokens),
        recompute,
        schedule,
        4 if reduce_dtype == "fp32" else 2,
        nccl,
        memory_mode,
    )
    with look.ticking("simulating"):
        found = run.answers(question)
    if out is not None:
        from tide.simulate import picture

        picture.paint(question, found, out)
    if as_json:
        look.print_json(run.as_json(question, found))
        return 0
    text.show(question, found)
    if out is not None:
        click.echo(f"picture: {out}")
    return 0
