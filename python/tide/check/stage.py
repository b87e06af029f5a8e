"""The stage on which a training script runs up to its model's first forward without doing anything.

    python -m tide.check.stage SETTINGS RESULT TARGET [ARGUMENTS...]

One process plays rank 0 of a launch: process groups are torch's fake ones, parameters go to the
meta device as modules register them, CUDA devices become the meta device, and the first forward of
a fully sharded root ends the play. SETTINGS is JSON (ranks, local_ranks, device); RESULT is the
file for what was found, as JSON.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import TorchFunctionMode


class ReachedForwardError(BaseException):
    """Ends the script; no `except Exception` of a script stops it."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state


class NoDevices(TorchFunctionMode):
    """CUDA devices are the meta device, and what is on the meta device stays there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta
        if meta and name in ("cpu", "cuda"):
            return args[0]
        if not meta and name == "cuda":
            return args[0].to("meta")
        if "device" in kwargs and (meta or is_cuda(kwargs["device"])):
            kwargs["device"] = "meta"
        if name == "to":
            args = tuple(
                "meta" if is_cuda(a) or (meta and isinstance(a, torch.device)) else a for a in args
            )
        return func(*args, **kwargs)


def is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def set_the_stage(ranks: int, local_ranks: int, device: str) -> None:
    """Replaces what would need peers or a device. For a process that does nothing else."""
    launch = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": local_ranks,
        "GROUP_RANK": 0,
        "GROUP_WORLD_SIZE": ranks // local_ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
    }
    os.environ.update({name: str(value) for name, value in launch.items()})
    fake_groups(ranks)
    torch._C._get_accelerator = lambda *_: torch.device(device)
    if device == "cuda":
        fake_cuda(local_ranks)
    meta_parameters()
    replace(torch, "compile", lambda model=None, **_: (lambda f: f) if model is None else model)
    replace(nn.Module, "compile", lambda self, *args, **kwargs: None)
    stop_at_forward()


def replace(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def fake_groups(ranks: int) -> None:
    from torch.distributed import device_mesh, distributed_c10d
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stock_init, stock_new = dist.init_process_group, dist.new_group

    def init(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            stock_init("fake", store=FakeStore(), rank=0, world_size=ranks)

    def new(ranks: Any = None, *_: Any, **kwargs: Any) -> Any:
        kept = {name: kwargs[name] for name in ("group_desc",) if name in kwargs}
        return stock_new(ranks, backend="fake", **kept)

    for module in (dist, distributed_c10d, device_mesh):
        for name, replacement in (("init_process_group", init), ("new_group", new)):
            if hasattr(module, name):
                setattr(module, name, replacement)


def fake_cuda(local_ranks: int) -> None:
    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None: ...
        def __getattr__(self, _: str) -> Any:
            return lambda *_, **__: None

    for name, answer in {
        "is_available": True,
        "is_initialized": True,
        "device_count": local_ranks,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "manual_seed": None,
        "manual_seed_all": None,
        "reset_peak_memory_stats": None,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "get_device_name": "no device",
        "is_bf16_supported": True,
    }.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    replace(torch.cuda, "Stream", Nothing)
    replace(torch.cuda, "Event", Nothing)
    replace(torch.cuda, "current_stream", lambda *_: Nothing())


def meta_parameters() -> None:
    stock = nn.Module.register_parameter

    def register(self: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        stock(self, name, parameter)
        if parameter is not None and not parameter.is_meta and type(parameter) is nn.Parameter:
            self._parameters[name] = nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    replace(nn.Module, "register_parameter", register)


def stop_at_forward() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    def nothing(*_: Any, **__: Any) -> None: ...

    group_class = _fsdp_param_group.FSDPParamGroup
    for name in ("_validate_no_meta_params", "_validate_cpu_offload_params"):
        setattr(group_class, name, nothing)
    replace(_fsdp_param_group.FSDPCommContext, "lazy_init", nothing)
    stock = _fsdp_state.FSDPState._lazy_init

    def ours(self: Any) -> Any:
        if self._is_root is not None:
            return stock(self)
        stock(self)
        raise ReachedForwardError(self)

    replace(_fsdp_state.FSDPState, "_lazy_init", ours)


def perform(target: str, arguments: list[str]) -> Any:
    """The FSDP state of the root that the target makes; a sentence where there is none."""
    try:
        with NoDevices():
            made = run_target(target, arguments)
            for module in made.modules() if isinstance(made, nn.Module) else ():
                get_state: Callable[[], Any] | None = getattr(module, "_get_fsdp_state", None)
                if get_state is not None:
                    get_state()._lazy_init()
    except ReachedForwardError as reached:
        return reached.state
    except SystemExit as error:
        return f"it ended with {error.code!r} before the first forward of a fully sharded model"
    except Exception as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        foreign = ("site-packages", "<frozen ", __file__)
        own = [f for f in frames if not any(name in f.filename for name in foreign)]
        where = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
        what = " ".join(str(error).split())[:300]
        return f"it raised {type(error).__name__}{where} before its first forward: {what}"
    if isinstance(made, nn.Module):
        return "its model went through no fully_shard"
    return "it ended without the first forward of a fully sharded model"


def run_target(target: str, arguments: list[str]) -> Any:
    module, colon, function = target.partition(":")
    if colon and not target.endswith(".py"):
        sys.path.insert(0, os.getcwd())
        sys.argv = [target, *arguments]
        with contextlib.suppress(AttributeError):
            found = getattr(importlib.import_module(module), function)
            if not dist.is_initialized():
                dist.init_process_group()
            return found(*arguments)
        raise AttributeError(f"module {module!r} has no function {function!r}")
    sys.argv = [target, *arguments]
    sys.path.insert(0, str(Path(target).resolve().parent))
    runpy.run_path(target, run_name="__main__")
    return None


def main() -> None:
    settings, result, target = json.loads(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    set_the_stage(settings["ranks"], settings["local_ranks"], settings["device"])
    found = perform(target, sys.argv[4:])
    from tide.check import verdict

    answer = {"failure": found} if isinstance(found, str) else verdict.judge(found)
    result.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
