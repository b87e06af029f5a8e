"""Training steps of a Llama-like model of a billion parameters, several ranks on one GPU: stock
FSDP2 beside tide, in one run.

Stock's flat collectives go over tide's own fabric (custom comms whose buffers are tide.empty), so
that only the layout differs: copy-in, copy-out and chunk_cat on one side, none on the other. Ranks
that share a GPU say nothing about links, and they compute in turns.

    python3 tests/bench/training_on_one_gpu.py --out FOLDER [--ranks 2 4] [--tiny]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parent.parent / "ranks"))
sys.path.insert(0, str(Path(__file__).parent))

import layers
import record
import tide
import torch
import torch.distributed as dist
from harness import all_gather_list, reduce_scatter_list, run_ranks
from settings import SAFE
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

ENGINES = ("stock", "tide in_place", "tide slot_reuse")
COPIES = ("fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat")
OWN_KERNELS = ("accumulate_", "pack", "cast_")


class Size:
    def __init__(self, tiny: bool) -> None:
        self.device = "cpu" if tiny else "cuda"
        self.width, self.inner, self.layers = (64, 160, 2) if tiny else (2048, 5632, 16)
        self.words, self.sequence = (128, 16) if tiny else (32000, 1024)
        self.warm, self.steps = (1, 2) if tiny else (3, 8)


class Llama(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        heads = size.width // (16 if size.width < 128 else 128)
        shape = layers.AttentionShape(size.width, heads, heads, size.width // heads)
        self.embedding = nn.Embedding(size.words, size.width)
        self.blocks = nn.ModuleList(
            layers.TransformerLayer(
                shape, size.sequence, layers.GatedFeedForward(size.width, size.inner)
            )
            for _ in range(size.layers)
        )
        self.head = nn.Linear(size.width, size.words, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class FlatGather(AllGather):
    """Stock's all-gather over tide: two buffers in turn, as two are alive at a time."""

    buffers: ClassVar[list[torch.Tensor]] = []
    turn: ClassVar[int] = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        FlatGather.turn = (FlatGather.turn + 1) % len(FlatGather.buffers)
        numel = size[0]
        return FlatGather.buffers[FlatGather.turn].view(dtype)[:numel]

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False):
        work = all_gather_list([output_tensor], [input_tensor], group)
        work.wait()
        return


class FlatReduce(ReduceScatter):
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op: bool = False):
        reduce_scatter_list([output_tensor], [input_tensor], op, group).wait()
        return


def build(engine: str, size: Size) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    options = tide.Options(inner_cuda="gloo", memory_mode=engine.partition(" ")[2] or "in_place")
    mesh = init_device_mesh(
        size.device,
        (dist.get_world_size(),),
        mesh_dim_names=("shard",),
        backend_override={"shard": ("tide", options)},
    )
    with torch.device(size.device):
        model = Llama(size)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if engine == "stock":
        # The root gathers embedding and head, in two bytes each element, every shard padded.
        block = sum(p.numel() for p in meta(size).blocks[0].parameters())
        padding = 4 * dist.get_world_size() * size.width
        each = 2 * (max(2 * size.words * size.width, block) + padding)
        FlatGather.buffers = [
            tide.empty(each, dtype=torch.uint8, device=size.device, group=mesh.get_group())
            for _ in range(2)
        ]
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(FlatGather())
                module.set_custom_reduce_scatter(FlatReduce())
    return model, mesh.get_group()


def synchronize(size: Size) -> None:
    if size.device == "cuda":
        torch.cuda.synchronize()


def train(engine: str, size: Size) -> dict[str, Any]:
    """One engine on this rank; nothing of it is left for the next one."""
    result, group = measured(engine, size)
    FlatGather.buffers = []
    gc.collect()
    if size.device == "cuda":
        torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group(group)
    return result


def measured(engine: str, size: Size) -> tuple[dict[str, Any], Any]:
    """Step times, losses, peak memory, and what a profile shows; and the process group."""
    model, group = build(engine, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=size.device == "cuda")
    torch.manual_seed(100 + dist.get_rank())
    batches = [
        torch.randint(0, size.words, (size.sequence,), device=size.device)
        for _ in range(size.warm + size.steps + 2)
    ]

    def step(words: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        out = model(words[:-1] if size.device == "cpu" else words)
        target = words[1:] if size.device == "cpu" else words.roll(-1)
        loss = nn.functional.cross_entropy(out.float(), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses, times = [], []
    for index in range(size.warm + size.steps):
        if index == size.warm and size.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        synchronize(size)
        begin = time.perf_counter()
        losses.append(step(batches[index]))
        synchronize(size)
        if index >= size.warm:
            times.append(1000 * (time.perf_counter() - begin))
    result: dict[str, Any] = {
        "engine": engine,
        "step_ms": statistics.median(times),
        "all_steps_ms": [round(t, 2) for t in times],
        "losses": [round(float(loss), 5) for loss in losses],
        "arena_mib": round(tide.of(group, size.device).counters()["arena_bytes"] / 2**20, 1),
    }
    if size.device == "cuda":
        result["torch_peak_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    if engine == "stock":
        # Of the arena, what stock itself would hold: two blocks on their way to be copied out.
        block = sum(p.numel() for p in meta(size).blocks[0].parameters())
        result["gather_buffers_mib"] = round(2 * 2 * block / 2**20, 1)
    result |= profiled(step, batches[-1], size)
    if engine != "stock":
        result["served"] = (
            f"{sum(r.path == 'tide' for r in tide.report(model))} of {size.layers + 1}"
        )
    return result, group


def profiled(step: Any, words: torch.Tensor, size: Size) -> dict[str, Any]:
    """Device time of one step in FSDP2's layout copies, and in tide's own kernels."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if size.device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        step(words)
        synchronize(size)
    copies: dict[str, float] = {}
    kernels: dict[str, Any] = {}
    for event in profile.key_averages():
        if event.key in COPIES:
            spent = event.device_time_total if size.device == "cuda" else event.cpu_time_total
            copies[event.key] = round(spent / 1000, 3)
        if event.key.startswith(OWN_KERNELS):
            kernels[event.key] = {
                "launches": event.count,
                "ms": round(event.device_time_total / 1000, 3),
            }
    return {
        "layout_copies_ms": round(sum(copies.values()), 3),
        "layout_copies": copies,
        "own_kernels": kernels,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    arguments = parser.parse_args()
    size = Size(arguments.tiny)
    rows: list[dict[str, Any]] = []

    def body(rank: int, ranks: int) -> list[dict[str, Any]]:
        if size.device == "cuda":
            torch.cuda.set_device(0)
        return [train(e, size) for _ in range(arguments.turns) for e in ENGINES]

    for ranks in arguments.ranks:
        found = run_ranks(ranks, body, timeout=240, group_timeout=60, environment=SAFE)
        for turn, first in enumerate(found[0]):
            row = {"ranks": ranks, "turn": turn // len(ENGINES), **first}
            row["step_ms"] = round(max(other[turn]["step_ms"] for other in found), 2)
            rows.append(row)
            shown = {k: v for k, v in row.items() if k not in ("all_steps_ms", "layout_copies")}
            print(shown, flush=True)
    report = record.begin("Training steps of a Llama-like model, ranks sharing one GPU")
    report["parameters"] = sum(p.numel() for p in meta(size).parameters())
    report["rows"] = rows
    report["savings"] = savings(rows)
    for line in report["savings"]:
        print(line)
    record.keep(report, arguments.out / "training_on_one_gpu.json")


def meta(size: Size) -> Llama:
    with torch.device("meta"):
        return Llama(size)


def savings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What tide takes off stock's step, beside the time of stock's layout copies (one rank's, times
    the ranks, as they share the GPU)."""
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        stock = [r for r in rows if r["ranks"] == ranks and r["engine"] == "stock"]
        step = min(r["step_ms"] for r in stock)
        copies = statistics.median(r["layout_copies_ms"] for r in stock) * ranks
        for engine in ENGINES[1:]:
            own = [r for r in rows if r["ranks"] == ranks and r["engine"] == engine]
            saved = step - min(r["step_ms"] for r in own)
            lines.append(
                {
                    "ranks": ranks,
                    "engine": engine,
                    "saved_ms": round(saved, 2),
                    "copies_of_all_ranks_ms": round(copies, 2),
                    "share": round(saved / copies, 2) if copies else None,
                }
            )
    return lines


if __name__ == "__main__":
    main()
