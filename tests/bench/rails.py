"""Gathers and reductions between emulated hosts beside what one rail can do, and beside gloo.

    python3 tests/bench/rails.py --out FOLDER [--hosts 2 3 4 5 8] [--rate 400mbit] [--mib 64]

One rank a host, rails limited by `ci/hosts --rate` (needs root). In each run: B, the goodput of one
large UCX put on the same rail (tests/network/put_rate.cc, built by `ci/test --cpp`); then
tide and gloo in turn, coalesced all-gather of nine bf16 parameters and reduce-scatter of the same.
With s the bf16 bytes of one rank's shard, the bounds are (M-1) s / B and (M-1) 2 s / B: fp32
partial sums travel. A time is from the first rank's start to the last one's end. `busy` is the
share of the machine's cores that was used meanwhile: well below 1, so the rails were the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import record
import tide
import torch
import torch.distributed as dist
from tide import bench_cases
from tide.ucx_package import packaged_ucx

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "build/tests/tests/put_rate"


def in_rank(mib: int, repetitions: int) -> None:
    """What torchrun starts on every host; rank 0 prints the samples."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    bench = bench_cases.Bench(repetitions, mib, mib)
    cpu, start = cpu_seconds(), time.perf_counter()
    results = {"gather": bench_cases.gather_case(bench), "reduce": bench_cases.reduce_case(bench)}
    spent = (cpu_seconds() - cpu) / (time.perf_counter() - start) / len(os.sched_getaffinity(0))
    nodes = json.loads(tide.of(bench.groups["tide"]).nodes())
    assert nodes.get("nodes") == bench.world, tide.of(bench.groups["tide"]).why_delegated()
    if bench.rank == 0:
        print("RESULT " + json.dumps({**results, "busy": round(spent, 2), "rail": nodes}))
    dist.destroy_process_group()


def cpu_seconds() -> float:
    """Of the whole machine, idle and waiting for disks aside."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    ticks = [int(field) for field in fields]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")


def measure(hosts: int, rate: str, mib: int, repetitions: int) -> dict[str, Any]:
    """One run on `hosts` emulated hosts."""
    with tempfile.TemporaryDirectory(prefix="tide-rails-") as store:
        library = (packaged_ucx() or [""])[0]
        put = f"{PROGRAM} {store} rail0 {mib << 20} 5 {library}"
        rank = f"{sys.executable} -m torch.distributed.run {__file__}"
        command = f"{put} && {rank} --in-rank --mib {mib} --repetitions {repetitions}"
        done = subprocess.run(
            [str(ROOT / "ci/hosts"), "--rate", rate, str(hosts), "1", "bash", "-c", command],
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )
    if done.returncode != 0:
        raise SystemExit((done.stdout + done.stderr)[-4000:])
    rates = [int(line.split("RATE ")[1]) for line in done.stdout.splitlines() if "RATE " in line]
    result = next(line for line in done.stdout.splitlines() if "RESULT " in line)
    return row(hosts, rates, json.loads(result.split("RESULT ", 1)[1]))


def row(hosts: int, rates: list[int], result: dict[str, Any]) -> dict[str, Any]:
    """Medians in ms, and how many times the bound they are."""
    goodput = statistics.median(rates)
    found: dict[str, Any] = {"hosts": hosts, "put_bytes_a_second": goodput, "rates": rates}
    for kind, factor in (("gather", 1), ("reduce", 2)):
        shard = result[kind]["bytes"] / hosts
        bound = 1e3 * (hosts - 1) * factor * shard / goodput
        samples = result[kind]["samples"]
        medians = {name: statistics.median(samples[name]) for name in ("tide", "gloo")}
        found[kind] = {
            "bytes": result[kind]["bytes"],
            "bound_ms": round(bound, 1),
            "tide": record.spread(samples["tide"]),
            "gloo": record.spread(samples["gloo"]),
            "tide_over_bound": round(medians["tide"] / bound, 3),
            "gloo_over_tide": round(medians["gloo"] / medians["tide"], 2),
        }
    return {**found, "busy": result["busy"], "rail": result["rail"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 3, 4, 5, 8])
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--in-rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.in_rank:
        in_rank(arguments.mib, arguments.repetitions)
        return
    if not PROGRAM.exists():
        raise SystemExit(f"{PROGRAM} is not built; `ci/test --cpp` builds it")
    report = record.begin(f"emulated rails of {arguments.rate}, one rank a host")
    report["rows"] = []
    for hosts in arguments.hosts:
        one = measure(hosts, arguments.rate, arguments.mib, arguments.repetitions)
        report["rows"].append(one)
        print(
            f"{hosts} hosts: put {one['put_bytes_a_second'] / 1e6:.1f} MB/s; all-gather "
            f"{one['gather']['tide_over_bound']:.3f} x its bound, gloo "
            f"{one['gather']['gloo_over_tide']:.2f} x tide; reduce-scatter "
            f"{one['reduce']['tide_over_bound']:.3f} x its bound, gloo "
            f"{one['reduce']['gloo_over_tide']:.2f} x tide; cores busy {one['busy']:.0%}",
            flush=True,
        )
        record.keep(report, arguments.out / "rails.json")


if __name__ == "__main__":
    main()
