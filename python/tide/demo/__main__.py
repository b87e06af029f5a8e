"""torchrun --nproc-per-node N -m tide.demo [OPTIONS]: trains on gloo, then on tide, compares,
paints, writes text."""

import os
from pathlib import Path

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tide.demo import picture
from tide.demo.model import Shape, continue_text, read_text
from tide.demo.training import Job, Result, Trainer, build, start_backend

PROMPT = b"def main(arguments):\n    "


def run_backend(name: str, job: Job, console: Console, letters: int) -> tuple[Result, str, str]:
    """One whole run: (measurements, tide's report, generated text); the last two only from tide on
    rank 0."""
    start_backend(name)
    model = build(job)
    columns = (
        TextColumn(f"{name:>5}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=job.rank != 0) as bar:
        task = bar.add_task("", total=job.steps, loss=float("nan"))
        trainer = Trainer(job, model, name)
        trainer.train(lambda loss: bar.update(task, advance=1, loss=loss))
    trainer.count()
    report, text = "", ""
    if name == "tide":
        import tide

        report = str(tide.report(model))
    if name == "tide":
        text = write_text(model, job, letters)
    dist.barrier()
    dist.destroy_process_group()
    return trainer.result, report, text


@torch.no_grad()
def write_text(model: nn.Module, job: Job, letters: int) -> str:
    """Every rank gathers the whole model once; then rank 0 writes from it alone."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_reshard_after_forward(False, recurse=False)
    model(torch.zeros(1, 1, dtype=torch.long))
    text = b""
    if job.rank == 0 and letters > 0:
        text = continue_text(model, PROMPT, letters, job.shape.context)
    dist.barrier()
    return text.decode("utf-8", errors="replace")


def loss_table(results: list[Result]) -> Table:
    table = Table(
        "step", *(f"loss, {result.backend}" for result in results), title="Losses, mean over ranks"
    )
    if len(results) == 2:
        table.add_column("difference", justify="right")
    steps = len(results[0].losses)
    shown = sorted({0, 1, *range(0, steps, max(1, steps // 8)), steps - 1} & set(range(steps)))
    for step in shown:
        losses = [result.losses[step] for result in results]
        row = [str(step), *(f"{loss:.4f}" for loss in losses)]
        table.add_row(*row, *([f"{losses[1] - losses[0]:+.4f}"] if len(losses) == 2 else []))
    return table


def measure_table(results: list[Result]) -> Table:
    table = Table("a step on rank 0", title="What a step costs (medians)")
    for result in results:
        table.add_column(result.backend, justify="right")
    if len(results) == 2:
        table.add_column("gloo / tide", justify="right")

    def row(
        name: str, values: list[float | None], unit: str, digits: int = 1, ratio: bool = False
    ) -> None:
        cells = [
            "not counted" if value is None else f"{value:,.{digits}f}{unit}" for value in values
        ]
        if len(values) == 2:
            first, second = values
            cells.append(f"{first / second:.1f} x" if ratio and first and second else "")
        table.add_row(name, *cells)

    row("time", [result.step_time() for result in results], " ms", ratio=True)
    row("computing alone", [result.alone_time() for result in results], " ms")
    row("optimizer", [result.optimizer_time() for result in results], " ms")
    row("communication", [result.communication_time() for result in results], " ms", ratio=True)
    row("in FSDP2's calls", [result.inside_time() for result in results], " ms", ratio=True)
    row("gathers", [result.gather_calls for result in results], "", 0)
    row("reduces", [result.reduce_calls for result in results], "", 0)
    for name in results[0].copies:
        row(f"copies, {name}", [result.copies[name] for result in results], "", 0)
    row("copies, time", [result.copy_time for result in results], " ms", 2)
    row("sent to other ranks", [mib(result.written_bytes) for result in results], " MiB", 3)
    row("the least possible", [mib(result.least_bytes) for result in results], " MiB", 3)
    return table


def mib(count: int | None) -> float | None:
    return None if count is None else count / 2**20


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--steps",
    default=120,
    show_default=True,
    type=click.IntRange(2),
    help="Training steps on each backend.",
)
@click.option(
    "--backend",
    "backends",
    multiple=True,
    default=("gloo", "tide"),
    show_default=True,
    help="Repeatable.",
)
@click.option(
    "--text",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of .py files.",
)
@click.option("--layers", default=6, show_default=True, type=click.IntRange(1))
@click.option(
    "--width", default=256, show_default=True, type=click.IntRange(8), help="A multiple of 8."
)
@click.option(
    "--sequences",
    default=4,
    show_default=True,
    type=click.IntRange(1),
    help="Sequences a rank and step.",
)
@click.option(
    "--letters",
    default=240,
    show_default=True,
    type=click.IntRange(0),
    help="Bytes to write at the end.",
)
@click.option(
    "--out", default=Path("tide-demo.png"), show_default=True, type=click.Path(path_type=Path)
)
def main(
    steps: int,
    backends: tuple[str, ...],
    text: Path | None,
    layers: int,
    width: int,
    sequences: int,
    letters: int,
    out: Path,
) -> None:
    """Trains a small language model with FSDP2 on gloo, then on tide, and compares them."""
    if "RANK" not in os.environ:
        raise click.ClickException(
            "start it with torchrun: torchrun --nproc-per-node 4 -m tide.demo"
        )
    if width % 8:
        raise click.ClickException(f"--width must be a multiple of 8, not {width}")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(
        max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    )
    console = Console(quiet=rank != 0)
    data = read_text(text)
    shape = Shape(layers=layers, width=width, hidden=width * 11 // 4)
    job = Job(shape, steps, sequences, data, rank, world)
    tokens = sequences * shape.context * world
    console.print(
        f"{world} ranks, {len(data) / 1e6:.1f} MB of text, {tokens} bytes a step, "
        f"torch {torch.__version__}"
    )
    results, report, written = [], "", ""
    for name in backends:
        result, one_report, one_text = run_backend(name, job, console, letters)
        results.append(result)
        report, written = report or one_report, written or one_text
    if rank != 0:
        return
    console.print(loss_table(results), measure_table(results))
    if report:
        console.print("tide.report(model):", style="bold")
        print(report)
    if written:
        console.print("The model, gathered by tide, writes:", style="bold")
        print(written)
    picture.paint(results, world, out)
    console.print(f"picture: {out}")


if __name__ == "__main__":
    main()
