"""One rank of one run of `tide parity`: the user's script, unchanged but for the backend's name.

    python -m tide.parity.rank SETTINGS FOLDER SCRIPT [ARGUMENTS...]

SETTINGS is JSON: backend (empty: the script's own), stock (what stands in for "tide" in a stock
run), seed, reordered (gradients are divided and then summed from the last rank), symmetric (FSDP2's
symmetric memory). Writes FOLDER/rank.N.json.
"""

from __future__ import annotations

import builtins
import io
import json
import os
import random
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tide import parity
from tide.parity.recorder import Recorder, Tee, listen


def replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def change_the_string(backend: str, stock: str) -> None:
    from torch.distributed import distributed_c10d

    original = dist.init_process_group

    def init(given: Any = None, *args: Any, **kwargs: Any) -> None:
        given = kwargs.pop("backend", given)
        original(backend or (stock if given == "tide" else given), *args, **kwargs)

    for module in (dist, distributed_c10d):
        replace(module, "init_process_group", init)


def reorder() -> None:
    """Stock reduce-scatters that divide first and sum from the last rank to the first.

    The fp32 sum of a few bf16 numbers is often exact, whatever the order; dividing before it leaves
    a trace of the last bit all the same, as it does in NCCL's averages.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    def reduce_scatter(
        self: Any,
        output_tensor: Any,
        input_tensor: Any,
        group: Any,
        op: Any,
        async_op: bool = False,
    ) -> None:
        ranks = group.size()
        slices = torch.empty_like(input_tensor)
        dist.all_to_all_single(slices, input_tensor, group=group)
        parts = slices.view(ranks, -1)
        total = parts[ranks - 1] / ranks
        for rank in reversed(range(ranks - 1)):
            total += parts[rank] / ranks
        if op == dist.ReduceOp.SUM:
            total *= ranks
        elif op != dist.ReduceOp.AVG:
            raise RuntimeError(f"tide parity cannot sum in another order with {op}")
        output_tensor.view(-1).copy_(total)

    replace(collectives.DefaultReduceScatter, "__call__", reduce_scatter)


def symmetric() -> None:
    """Every module that goes through fully_shard communicates by symmetric memory."""
    from torch.distributed import fsdp
    from torch.distributed.fsdp import _fully_shard

    original = fsdp.fully_shard

    def shard(module: Any, **kwargs: Any) -> Any:
        made = original(module, **kwargs)
        for name in ("set_symm_mem_for_comm", "set_symm_mem"):
            if hasattr(made, name):
                getattr(made, name)()
                return made
        raise RuntimeError("this torch's FSDP2 has no symmetric memory")

    for module in (fsdp, _fully_shard):
        replace(module, "fully_shard", shard)


def watch_tensorboard(recorder: Recorder) -> None:
    if find_spec("tensorboard") is None:
        return
    from torch.utils.tensorboard import SummaryWriter

    original = SummaryWriter.add_scalar

    def add(self: Any, tag: str, value: Any, step: Any = None, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.pop("global_step", step)
        recorder.scalar(tag, value, step)
        return original(self, tag, value, step, *args, **kwargs)

    replace(SummaryWriter, "add_scalar", add)


def watch_files(recorder: Recorder) -> None:
    """JSON lines that the script writes to a file of its own."""
    original = io.open

    def opened(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        made = original(file, mode, *args, **kwargs)
        if str(file).endswith((".jsonl", ".ndjson")) and mode[:1] in ("w", "a", "x"):
            listen(made, recorder)
        return made

    for module in (builtins, io):
        replace(module, "open", opened)


def main() -> None:
    settings, folder, script = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    sys.argv = sys.argv[3:]
    recorder = Recorder()
    parity.current = recorder
    sys.stdout, sys.stderr = Tee(sys.stdout, recorder), Tee(sys.stderr, recorder)
    change_the_string(settings["backend"], settings["stock"])
    if settings["reordered"]:
        reorder()
    if settings["symmetric"]:
        symmetric()
    watch_tensorboard(recorder)
    watch_files(recorder)
    random.seed(settings["seed"])
    torch.manual_seed(settings["seed"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(settings["seed"] % (1 << 32))
    sys.path.insert(0, str(Path(script).resolve().parent))
    ended_well = False
    try:
        runpy.run_path(script, run_name="__main__")
        ended_well = True
    except SystemExit as error:
        ended_well = error.code in (None, 0)
        raise
    finally:
        recorder.save(folder / f"rank.{os.environ['RANK']}.json", ended_well)


if __name__ == "__main__":
    main()
