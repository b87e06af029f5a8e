"""One rank of `tide bench`; started by it through torchrun, once for each number of ranks and
setting.

python -m tide.bench_ranks FOLDER SETTINGS: SETTINGS is JSON (cases, repetitions, operation_mib,
path_mib, memory).
Rank 0 writes FOLDER/result.json; every rank writes FOLDER/rank.N with its process id.
"""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tide import bench_cases


def memory_run(bench: bench_cases.Bench, backend: str, seconds: float) -> dict[str, Any]:
    """Steps of the demonstration's model on one backend while the parent samples this process's
    memory."""
    from tide.demo.model import read_text

    text = read_text(None)[: 1 << 20].clone()
    model = bench_cases.step_model(bench, bench.groups[backend])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    more = torch.ones(1)
    step, start = 0, time.monotonic()
    while more.item():
        bench_cases.one_step(bench, model, text, step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        more[0] = float(bench.rank == 0 and time.monotonic() - start < seconds)
        dist.all_reduce(more)
    return {"steps": step}


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    memory = settings.get("memory")
    dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    (folder / f"rank.{dist.get_rank()}").write_text(str(os.getpid()))
    bench = bench_cases.Bench(
        settings["repetitions"], settings["operation_mib"], settings["path_mib"], memory or "tide"
    )
    result: dict[str, Any] = {}
    if memory:
        result["memory"] = memory_run(bench, memory, settings["seconds"])
    for case in settings.get("cases", []):
        result[case] = bench_cases.CASES[case](bench)
        dist.barrier()
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
