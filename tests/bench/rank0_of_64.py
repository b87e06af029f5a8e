"""What rank 0 of 64 spends on FSDP2's layout copies, and on computing, on one GPU.

Stock FSDP2 runs on torch's fake process group: its copies are real, nothing is sent. One layer of
a real model is measured and multiplied by the number of layers. An all-gather in place of the
fake one hands out memory that holds random weights, so that products cost what they cost.

    python3 tests/bench/rank0_of_64.py --out FOLDER     # --tiny: on a CPU, seconds, to try it
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import layers
import record
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

RANKS = 64
LAYERS = 3
"""In the sharded model: enough for prefetching to overlap as it does in a long model."""
COPIES = {
    "all_gather_copy_in": (2, "fsdp::all_gather_copy_in"),
    "split_with_sizes_copy": (2, "fsdp::split_with_sizes_copy"),
    "chunk_cat": (1, "fsdp::chunk_cat", "aten::_chunk_cat"),
}
"""How often each layout copy runs a layer and step, and torch's names for it, outermost first."""
PAPER = "Llama-3.1 70B at 8K tokens a GPU: 0.33 s a step, 6.4 % of it"


class RandomGather:
    """An all-gather that moves nothing: its buffers, used in turn, hold random weights already."""

    def __init__(self, numel: int, device: torch.device) -> None:
        self._buffers = [
            torch.randn(numel, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(3)
        ]
        self._next = 0

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        (numel,) = size
        self._next = (self._next + 1) % len(self._buffers)
        assert dtype == torch.bfloat16
        return self._buffers[self._next][:numel]

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


def compute_ms(model: layers.Model, tokens: int, device: torch.device) -> dict[str, float]:
    """Forward and backward of one layer that is not sharded."""
    with torch.device(device):
        layer = model.make().bfloat16()
    layers.randomise(layer)
    x = torch.randn(tokens, model.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def forward() -> torch.Tensor:
        return layer(x)

    def both() -> None:
        forward().backward(gradient)

    forward_ms = record.median_ms(forward, device, 5)
    both_ms = record.median_ms(both, device, 5)
    return {"forward_ms": forward_ms, "backward_ms": both_ms - forward_ms}


def sharded(model: layers.Model, device: torch.device) -> nn.Module:
    with torch.device("meta"):
        stack = nn.Sequential(*(model.make() for _ in range(LAYERS))).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    numel = sum(
        -(-len(parameter) // RANKS) * RANKS * (parameter.numel() // len(parameter))
        for parameter in stack[0].parameters()
    )
    mesh = dist.init_device_mesh(device.type, (RANKS,))
    gather = RandomGather(numel, device)
    for layer in stack:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
        layer.set_custom_all_gather(gather)
    fully_shard(stack, mesh=mesh, mp_policy=policy)
    stack.to_empty(device=device)
    layers.randomise(stack)
    return stack


def copies_ms(stack: nn.Module, tokens: int, width: int, device: torch.device) -> dict[str, Any]:
    """Time of each layout copy a layer and step, and the step's own time a layer."""
    x = torch.randn(tokens, width, device=device, dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.randn_like(x)

    def step() -> None:
        stack(x).backward(gradient)
        stack.zero_grad()

    step_ms = record.median_ms(step, device, 5)
    steps = 3
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as trace:
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    events = {event.key: event for event in trace.key_averages()}
    times = {}
    for name, (calls, *keys) in COPIES.items():
        event = next((events[key] for key in keys if key in events), None)
        if event is None or event.count != calls * steps * LAYERS:
            count = event.count if event else 0
            print(f"note: {name} ran {count / steps / LAYERS} times a layer and step, not {calls}")
        total = 0.0
        if event is not None:
            total = event.device_time_total if device.type == "cuda" else event.cpu_time_total
        times[name] = total / 1000 / steps / LAYERS
    return {"step_ms": step_ms / LAYERS, **times}


def measure(model: layers.Model, tokens: Sequence[int], device: torch.device) -> list[Any]:
    rows = []
    stack = sharded(model, device)
    for count in tokens:
        compute = compute_ms(model, count, device)
        copies = copies_ms(stack, count, model.width, device)
        step_ms = copies.pop("step_ms")
        copied = sum(copies.values())
        computing = sum(compute.values())
        rows.append(
            {
                "model": model.name,
                "tokens": count,
                "layers": model.layers,
                **{name: round(value, 3) for name, value in compute.items()},
                "copies_ms": {name: round(value, 3) for name, value in copies.items()},
                "sharded_layer_ms": round(step_ms, 3),
                "copies_s_a_step": round(copied * model.layers / 1000, 4),
                "compute_s_a_step": round(computing * model.layers / 1000, 3),
                "share": round(copied / (copied + computing), 4),
                "share_recomputing": round(
                    copied / (copied + computing + compute["forward_ms"]), 4
                ),
            }
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return rows


def show(rows: list[Any]) -> None:
    print(f"{'model':15} {'tokens':>6} {'compute':>8} {'copy in':>8} {'split':>7} {'chunk_cat':>9}")
    print(f"{'':22} {'ms':>8} {'ms':>8} {'ms':>7} {'ms':>9}  copies a step, share (recomputing)")
    for row in rows:
        copies = row["copies_ms"]
        print(
            f"{row['model']:15} {row['tokens']:6} {row['forward_ms'] + row['backward_ms']:8.2f} "
            f"{copies['all_gather_copy_in']:8.3f} {copies['split_with_sizes_copy']:7.3f} "
            f"{copies['chunk_cat']:9.3f}  {row['copies_s_a_step']:.3f} s "
            f"{row['share']:.1%} ({row['share_recomputing']:.1%})"
        )
    print(f"the paper: {PAPER}")


def paint(report: record.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(record.PICTURE_STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6), layout="constrained")
        names = dict.fromkeys(row["model"] for row in report["rows"])
        for name, shade in zip(names, record.SHADES, strict=False):
            rows = [row for row in report["rows"] if row["model"] == name]
            axes.plot(
                [row["tokens"] / 1024 for row in rows],
                [100 * row["share"] for row in rows],
                "o-",
                color=shade,
                label=f"{name}: {rows[-1]['copies_s_a_step']:.2f} s a step",
            )
        axes.plot([8], [6.4], "x", color="#333333", ms=9, label="the paper, Llama: 0.33 s a step")
        axes.set_ylim(0)
        axes.set_xlabel("tokens a GPU, in 1024")
        axes.set_ylabel("layout copies, % of copies and computing")
        axes.set_title("Stock FSDP2, rank 0 of 64", loc="left", fontweight="bold")
        axes.legend(frameon=False)
        axes.text(
            *(1, 1.02, record.note(report)),
            ha="right",
            fontsize=8,
            color="#777777",
            transform=axes.transAxes,
        )
        figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results"))
    parser.add_argument("--models", nargs="+", default=list(layers.MODELS))
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--tiny", action="store_true", help="small shapes on the CPU")
    chosen = parser.parse_args()
    if not chosen.tiny and not torch.cuda.is_available():
        raise SystemExit("no GPU here; --tiny runs small shapes on the CPU")
    device = torch.device("cpu" if chosen.tiny else "cuda")
    models = layers.TINY_MODELS if chosen.tiny else layers.MODELS
    tokens = chosen.tokens or ([64, 128] if chosen.tiny else [8192, 16384, 24576, 32768])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    report = record.begin("layout copies and computing of one layer, rank 0 of 64, stock FSDP2")
    report |= {"ranks": RANKS, "paper": PAPER, "rows": []}
    for name in chosen.models:
        report["rows"] += measure(models[name], tokens, device)
    show(report["rows"])
    record.keep(report, chosen.out / "rank0_of_64.json")
    paint(report, chosen.out / "rank0_of_64.png")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
