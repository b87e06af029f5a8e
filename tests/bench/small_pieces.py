"""Groups of many pieces on one GPU: tide's gather and reduce beside stock's, which copies.

    python3 tests/bench/small_pieces.py --out FOLDER [--ranks 4 2] [--tiny]

Two groups, all bf16: 128 experts of 3 matrices with shards of half a MiB, and 2,000 tensors with
shards of 4 KiB. Stock is what FSDP2 does, over tide's own fabric: copy-in, one flat gather,
split_with_sizes_copy; _chunk_cat and one flat reduce of bf16 slices to fp32. tide gathers and
reduces the lists themselves. They take turns in the same processes; a time is that of the slowest
rank from a barrier to an idle device, `host` is what the call itself takes. Ranks that share a GPU
say nothing about links: here SMs make every copy.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))

import record
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, run_ranks
from settings import SAFE

SHAPES = {"experts": (128 * 3, 512 << 10), "small tensors": (2000, 4 << 10)}  # pieces, shard bytes
WAYS = ("stock", "stock's copies", "tide")


class Case:
    """One group's tensors on this rank, and the six things that are timed."""

    def __init__(self, pieces: int, shard_bytes: int, device: str) -> None:
        self.device, self.ranks = device, dist.get_world_size()
        numel = shard_bytes // 2
        self.numels = [numel] * pieces
        everything = pieces * numel
        make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
        torch.manual_seed(3 + dist.get_rank())
        self.shards = [torch.randn(numel, **make) for _ in range(pieces)]
        self.gradients = [torch.randn(numel * self.ranks, **make) for _ in range(pieces)]
        whole = tide.empty(everything * self.ranks, **make)
        self.places = list(whole.split([n * self.ranks for n in self.numels]))
        self.flat_shard = torch.empty(everything, **make)
        self.flat = tide.empty(everything * self.ranks, **make)
        self.unsharded = [torch.empty(numel * self.ranks, **make) for _ in range(pieces)]
        self.packed = torch.empty(self.ranks, everything, **make)
        self.sums = {way: torch.empty(everything, device=device) for way in ("stock", "tide")}
        self.one = tide.GroupLayout((1,))
        self.rows = tide.GroupLayout((1,) * pieces)

    def copy_in(self) -> None:
        torch._foreach_copy_(list(self.flat_shard.split(self.numels)), self.shards)

    def copy_out(self) -> None:
        out = [tensor.view(self.ranks, -1) for tensor in self.unsharded]
        torch.split_with_sizes_copy(self.flat.view(self.ranks, -1), self.numels, dim=1, out=out)

    def chunk_cat(self) -> None:
        torch._chunk_cat(self.gradients, dim=0, num_chunks=self.ranks, out=self.packed)

    def runs(self) -> dict[tuple[str, str], Callable[[], None]]:
        def stock_gather() -> None:
            self.copy_in()
            all_gather_list([self.flat], [self.flat_shard]).wait()
            self.copy_out()

        def copies() -> None:
            self.copy_in()
            self.copy_out()

        def stock_reduce() -> None:
            self.chunk_cat()
            self.one.reduce_scatter(self.sums["stock"], [self.packed.view(-1)])

        return {
            ("gather", "stock"): stock_gather,
            ("gather", "stock's copies"): copies,
            ("gather", "tide"): lambda: all_gather_list(self.places, self.shards).wait() and None,
            ("reduce", "stock"): stock_reduce,
            ("reduce", "stock's copies"): self.chunk_cat,
            ("reduce", "tide"): lambda: (
                self.rows.reduce_scatter(self.sums["tide"], self.gradients) and None
            ),
        }

    def check(self) -> None:
        for place, other in zip(self.places, self.unsharded, strict=True):
            assert torch.equal(place, other), "the gathers differ"
        assert torch.equal(self.sums["tide"], self.sums["stock"]), "the sums differ"

    def synchronize(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def measured(case: Case, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """By "direction way": (milliseconds to an idle device, milliseconds of the call) each time."""
    times: dict[str, list[tuple[float, float]]] = {}
    for repeat in range(repeats + 1):
        for (direction, way), run in case.runs().items():
            dist.barrier()
            case.synchronize()
            begin = time.perf_counter()
            run()
            called = time.perf_counter()
            case.synchronize()
            ended = time.perf_counter()
            if repeat > 0:
                sample = (1000 * (ended - begin), 1000 * (called - begin))
                times.setdefault(f"{direction} {way}", []).append(sample)
        if repeat == 0:
            case.check()
    return times


def rows_of(shape: str, ranks: int, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for direction in ("gather", "reduce"):
        row: dict[str, Any] = {"group": shape, "ranks": ranks, "direction": direction}
        for way in WAYS:
            by_rank = [rank[f"{direction} {way}"] for rank in found]
            slowest = [max(sample[0] for sample in turn) for turn in zip(*by_rank, strict=True)]
            calls = [max(sample[1] for sample in turn) for turn in zip(*by_rank, strict=True)]
            row[way] = record.spread(slowest) | {"host": round(statistics.median(calls), 3)}
        row["tide / stock"] = round(row["tide"]["median"] / row["stock"]["median"], 3)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--tiny", action="store_true", help="small groups on the CPU")
    arguments = parser.parse_args()
    shapes = {"experts": (12, 4096), "small tensors": (50, 256)} if arguments.tiny else SHAPES
    rows: list[dict[str, Any]] = []
    for ranks in arguments.ranks:
        for shape, (pieces, shard_bytes) in shapes.items():

            def body(rank: int, size: int, pieces: int = pieces, each: int = shard_bytes) -> Any:
                if not arguments.tiny:
                    torch.cuda.set_device(0)
                case = Case(pieces, each, "cpu" if arguments.tiny else "cuda")
                return measured(case, arguments.repeats)

            found = run_ranks(ranks, body, timeout=100, group_timeout=60, environment=SAFE)
            rows += rows_of(shape, ranks, found)
            for row in rows[-2:]:
                print(row, flush=True)
    report = record.begin(
        "Groups of many pieces, ranks sharing one GPU: tide beside stock's copies"
    )
    report["shapes"] = shapes
    report["rows"] = rows
    record.keep(report, arguments.out / "small_pieces.json")


if __name__ == "__main__":
    main()
