"""`tide bench`: tide beside gloo on this machine, as ratios within one run. JSON, a table and a
picture; never a verdict.

Starts the ranks anew for each number of ranks and setting; what they do is in bench_cases.py.
"""

import json
import math
import os
import platform
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.table import Table

from tide import look

Json = dict[str, Any]
SAVINGS = ("both", "gather", "reduce")
"""Settings of TIDE_FSDP whose savings are compared."""
LONGEST_SECONDS = 900.0
"""Of one launch; a longer one hangs."""


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all do not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summary(samples: Sequence[float]) -> Json:
    return {
        "median_ms": round(median(samples), 3),
        "p95_ms": round(percentile(samples, 0.95), 3),
        "least_ms": round(min(samples), 3),
        "samples_ms": [round(sample, 3) for sample in samples],
    }


def summarize(value: Any) -> Any:
    """Replaces each list of samples, however deep, by its summary."""
    if isinstance(value, dict):
        return {name: summarize(inner) for name, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, float) for item in value):
        return summary(value)
    return value


def machine() -> Json:
    model = ""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processor": model or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release(),
        "load_before": os.getloadavg()[0],
    }


def versions() -> Json:
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for package in ("torch", "tide"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


class MemorySampler(threading.Thread):
    """Reads the ranks' proportional set sizes every 50 ms until stopped; keeps the highest sum."""

    def __init__(self, folder: Path, ranks: int) -> None:
        super().__init__(daemon=True)
        self.folder, self.ranks = folder, ranks
        self.peak_kib = 0
        self.samples = 0
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(0.05):
            files = list(self.folder.glob("rank.*"))
            if len(files) < self.ranks:
                continue
            try:
                total = sum(proportional_kib(int(file.read_text())) for file in files)
            except (OSError, ValueError):
                continue
            self.peak_kib = max(self.peak_kib, total)
            self.samples += 1

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def proportional_kib(process: int) -> int:
    for line in Path(f"/proc/{process}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1])
    return 0


def ranks_own_words(text: str) -> str:
    """What the ranks wrote before the launcher began to speak about it; their last 40 lines."""
    own = []
    for line in text.splitlines():
        if "torch/distributed/elastic" in line and not line.lstrip().startswith(("File", "[rank")):
            break
        own.append(line)
    return "\n".join(own[-40:] or text.splitlines()[-40:])


def run_ranks(ranks: int, settings: Json, environment: dict[str, str]) -> Json:
    """Starts `ranks` processes by torchrun, waits, returns what rank 0 wrote. Raises
    click.ClickException."""
    with tempfile.TemporaryDirectory(prefix="tide-bench-") as name:
        folder = Path(name)
        command = look.torchrun(ranks, "-m", "tide.bench_ranks", name)
        sampler = MemorySampler(folder, ranks) if settings.get("memory") else None
        log = folder / "log"
        if sampler:
            sampler.start()
        variables = {"OMP_NUM_THREADS": "1", **environment}
        with look.Child([*command, json.dumps(settings)], variables, log) as child:
            status = child.wait(LONGEST_SECONDS)
        if sampler:
            sampler.stop()
        if status != 0:
            click.echo(ranks_own_words(log.read_text(errors="replace")), err=True)
            how = f"ended with {status}" if status is not None else "did not end in time"
            raise click.ClickException(f"{ranks} ranks of tide bench {how}; their words are above")
        result: Json = json.loads((folder / "result.json").read_text())
        if sampler:
            result["memory"] |= {
                "peak_pss_mib": round(sampler.peak_kib / 1024, 1),
                "readings": sampler.samples,
            }
        return result


def measure(ranks: int, cases: Sequence[str], settings: Json) -> Json:
    """All cases for one number of ranks."""
    result: Json = {}
    inner = [case for case in cases if case in ("gather", "reduce", "path")]
    for case in inner:
        with look.ticking(f"{ranks} ranks: {case}"):
            result |= run_ranks(ranks, {**settings, "cases": [case]}, {})
    if "step" in cases:
        result["step"] = {}
        for setting in SAVINGS:
            with look.ticking(f"{ranks} ranks: step, TIDE_FSDP={setting}"):
                one = run_ranks(ranks, {**settings, "cases": ["step"]}, {"TIDE_FSDP": setting})
            result["step"][setting] = one["step"]
    if "memory" in cases:
        result["memory"] = {}
        for backend in ("gloo", "tide"):
            with look.ticking(f"{ranks} ranks: memory, {backend}"):
                one = run_ranks(ranks, {**settings, "memory": backend}, {})
            result["memory"][backend] = one["memory"]
    result = summarize(result)
    if "step" in result:
        result["step"]["savings"] = savings(result["step"])
    return result


def savings(step: Json) -> Json:
    """Communication time saved against gloo in the same run, as a share of gloo's, for each
    setting."""
    share = {}
    for setting in SAVINGS:
        one = step[setting]["communication"]
        share[setting] = 1 - one["tide"]["median_ms"] / one["gloo"]["median_ms"]
    return {**share, "gather_plus_reduce": share["gather"] + share["reduce"]}


def compared(result: Json) -> list[tuple[str, float, float, float | None]]:
    """(what, gloo ms, tide ms, memcpy ms or None) for every comparison in the result of one number
    of ranks."""
    rows: list[tuple[str, float, float, float | None]] = []

    def add(what: str, samples: Json) -> None:
        copy = samples["memcpy"]["median_ms"] if "memcpy" in samples else None
        rows.append((what, samples["gloo"]["median_ms"], samples["tide"]["median_ms"], copy))

    for case, what in (("gather", "coalesced all-gather"), ("reduce", "coalesced reduce-scatter")):
        if case in result:
            add(what, result[case]["samples"])
    if "path" in result:
        add("FSDP2 unshard and wait", result["path"]["unshard"])
        add("FSDP2 post-backward", result["path"]["post_backward"])
    if "step" in result:
        add("one step, communication", result["step"]["both"]["communication"])
        add("one step, in FSDP2's calls", result["step"]["both"]["inside"])
        add("one step, whole", result["step"]["both"]["step"])
    return rows


def tables(report: Json) -> list[Table]:
    shown = []
    for ranks, result in report["ranks"].items():
        times = Table(title=f"{ranks} ranks: medians, ms", title_justify="left")
        times.add_column("", no_wrap=True)
        for name in ("gloo", "tide", "ratio", "memcpy", "ratio"):
            times.add_column(name, justify="right", no_wrap=True)
        for what, gloo, tide, copy in compared(result):
            beside = (f"{copy:.1f}", f"{tide / copy:.2f} x") if copy else ("", "")
            times.add_row(what, f"{gloo:.1f}", f"{tide:.1f}", f"{gloo / tide:.1f} x", *beside)
        shown.append(times)
        others = Table(title=f"{ranks} ranks: bytes and savings", title_justify="left")
        others.add_column("", no_wrap=True)
        others.add_column("", justify="right", no_wrap=True)
        for case in ("gather", "reduce"):
            if case in result:
                one = result[case]
                others.add_row(
                    f"{case}: bytes written to other ranks, a rank", f"{one['written_bytes']:,}"
                )
                others.add_row("  the least possible", f"{one['least_bytes']:,}")
        for name, one in result.get("memory", {}).items():
            others.add_row(f"peak PSS of all ranks, {name}", f"{one['peak_pss_mib']:,.1f} MiB")
        for name, share in result.get("step", {}).get("savings", {}).items():
            others.add_row(f"communication saved, {name.replace('_', ' ')}", f"{share:.0%}")
        if others.row_count:
            shown.append(others)
    return shown


@click.command()
@click.option(
    "--ranks",
    multiple=True,
    type=click.IntRange(2),
    default=(2, 4),
    show_default=True,
    help="On this host; repeatable.",
)
@click.option(
    "--case",
    "cases",
    multiple=True,
    type=click.Choice(["gather", "reduce", "path", "step", "memory"]),
    default=("gather", "reduce", "path", "step", "memory"),
    show_default=True,
    help="What is compared; repeatable.",
)
@click.option(
    "--repetitions",
    default=15,
    show_default=True,
    type=click.IntRange(1),
    help="Of each backend, in turns.",
)
@click.option(
    "--operation-mib",
    default=32,
    show_default=True,
    type=click.IntRange(1),
    help="Gathered size of the two collectives.",
)
@click.option(
    "--path-mib",
    default=64,
    show_default=True,
    type=click.IntRange(1),
    help="Size of the FSDP2 group.",
)
@click.option(
    "--seconds",
    default=8.0,
    show_default=True,
    type=click.FloatRange(min=0, max=LONGEST_SECONDS / 2),
    help="Length of each memory run.",
)
@click.option("--out", default="tide-bench", show_default=True, help="Writes OUT.json and OUT.png.")
@look.json_option
def command(
    ranks: tuple[int, ...],
    cases: tuple[str, ...],
    repetitions: int,
    operation_mib: int,
    path_mib: int,
    seconds: float,
    out: str,
    as_json: bool,
) -> None:
    """Compare tide with gloo on this machine, repetition by repetition in one run.

    Shows medians as a table, and as a picture how many times faster than gloo; the JSON holds every
    sample, the machine, versions and the command. Takes minutes; never a verdict.

    \b
        tide bench --ranks 4 --case path --repetitions 5
    """
    for suffix in (".json", ".png"):
        look.writable(Path(f"{out}{suffix}"))
    settings = {
        "repetitions": repetitions,
        "operation_mib": operation_mib,
        "path_mib": path_mib,
        "seconds": seconds,
    }
    report: Json = {
        "command": shlex.join(["tide", *sys.argv[1:]]),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "ranks": {},
    }
    load = report["machine"]["load_before"]
    if load > 0.5:
        click.echo(
            f"other work runs here (load {load:.1f}); ratios hold better than times", err=True
        )
    for count in ranks:
        report["ranks"][str(count)] = measure(count, cases, settings)
    Path(f"{out}.json").write_text(json.dumps(report, indent=1) + "\n")
    from tide import bench_picture

    drawn = bench_picture.paint(report, compared, Path(f"{out}.png"))
    if as_json:
        look.print_json(report)
        return
    console = look.console()
    for table in tables(report):
        console.print(table)
    console.print(f"written: {out}.json{f', {out}.png' if drawn else ''}")
