"""What the seam needs from torch's FSDP2, checked by name before anything is rebound.

A torch that does not answer as expected is refused with one sentence; nothing is guessed. Facts
that differ between the known minors (2.11, 2.14, 2.15) are found here and handed to the rest of the
seam as `Torch`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from tide import knobs

KNOWN_MINORS = ("2.11", "2.12", "2.13", "2.14", "2.15")

GATHER_ARGUMENTS = (
    "fsdp_params",
    "group",
    "async_op",
    "all_gather_copy_in_stream",
    "all_gather_stream",
    "device",
    "all_gather_comm",
)
COPY_OUT_ARGUMENTS = ("all_gather_result", "fsdp_params", "group")
REDUCE_ARGUMENTS = (
    "fsdp_params",
    "unsharded_grads",
    "reduce_scatter_group",
    "reduce_scatter_stream",
    "reduce_scatter_comm",
    "reduce_dtype",
    "device",
    "gradient_divide_factor",
    "all_reduce_group",
)
COPY_IN_ARGUMENTS = ("unsharded_grads", "reduce_scatter_input", "world_size")
RESULT_FIELDS = (
    "all_gather_output",
    "all_gather_event",
    "all_gather_work",
    "param_all_gather_input_dtypes",
    "param_all_gather_input_numels",
    "all_gather_input_split_sizes",
)
PARAMETER_METHODS = (
    "init_all_gather_outputs",
    "init_unsharded_param",
    "free_unsharded_param",
    "reset_sharded_param",
    "to_sharded",
)
GROUP_METHODS = (
    "lazy_init",
    "unshard",
    "wait_for_unshard",
    "reshard",
    "post_backward",
    "finalize_backward",
    "_to_sharded",
    "_to_sharded_post_forward",
)
CALLERS = {
    "foreach_all_gather": "unshard",
    "foreach_all_gather_copy_out": "wait_for_unshard",
    "foreach_reduce": "post_backward",
}


class Arguments:
    """Reads one argument of a call by name, wherever the caller put it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters
        self._index = {
            name: index
            for index, (name, parameter) in enumerate(parameters.items())
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
        }
        self._default = {name: parameter.default for name, parameter in parameters.items()}

    def __contains__(self, name: str) -> bool:
        return name in self._default

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        index = self._index.get(name)
        if index is not None and index < len(args):
            return args[index]
        return self._default[name]


@dataclass(frozen=True)
class Torch:
    """The modules of torch's FSDP2 that the seam touches."""

    param_group: ModuleType
    collectives: ModuleType
    param: ModuleType
    state: ModuleType

    @property
    def has_prepare_hook(self) -> bool:
        """Whether foreach_reduce takes the function that lays gradients out (2.15)."""
        return hasattr(self.collectives, "_default_reduce_scatter_input_fn")


def load() -> Torch:
    from torch.distributed.fsdp._fully_shard import (
        _fsdp_collectives,
        _fsdp_param,
        _fsdp_param_group,
        _fsdp_state,
    )

    return Torch(_fsdp_param_group, _fsdp_collectives, _fsdp_param, _fsdp_state)


def refusal(modules: Torch, version: str = torch.__version__) -> str:
    """Why this torch's FSDP2 cannot be served; empty when it can."""
    minor = ".".join(version.split(".")[:2])
    if minor not in KNOWN_MINORS and knobs.text("TIDE_FSDP_FORCE") != "1":
        return (
            f"torch {minor} is not one of the versions that tide's FSDP2 path knows "
            f"({', '.join(KNOWN_MINORS)}); TIDE_FSDP_FORCE=1 tries it all the same"
        )
    return (
        _missing_names(modules)
        or _unknown_arguments(modules)
        or _unused_globals(modules)
        or _unknown_result(modules)
    )


def _missing_names(modules: Torch) -> str:
    wanted: list[tuple[Any, str, str]] = [
        (modules.collectives, "torch's FSDP2 collectives", name)
        for name in ("AllGatherResult", "DefaultAllGather", "DefaultReduceScatter")
    ]
    wanted += [(modules.param_group, "torch's FSDP2 group module", name) for name in CALLERS]
    wanted.append(
        (modules.collectives, "torch's FSDP2 collectives", "foreach_reduce_scatter_copy_in")
    )
    for owner, title, name in wanted:
        if not hasattr(owner, name):
            return f"{title} have no {name}"
    for name in GROUP_METHODS:
        if not hasattr(modules.param_group.FSDPParamGroup, name):
            return f"torch's FSDPParamGroup has no {name}"
    for name in PARAMETER_METHODS:
        if not hasattr(modules.param.FSDPParam, name):
            return f"torch's FSDPParam has no {name}"
    if not hasattr(modules.state.FSDPState, "_lazy_init"):
        return "torch's FSDPState has no _lazy_init"
    return ""


def _unknown_arguments(modules: Torch) -> str:
    expected = (
        (modules.param_group.foreach_all_gather, GATHER_ARGUMENTS),
        (modules.param_group.foreach_all_gather_copy_out, COPY_OUT_ARGUMENTS),
        (modules.param_group.foreach_reduce, REDUCE_ARGUMENTS),
        (modules.collectives.foreach_reduce_scatter_copy_in, COPY_IN_ARGUMENTS),
    )
    for function, names in expected:
        present = inspect.signature(function).parameters
        missing = [name for name in names if name not in present]
        if missing:
            where = f"{getattr(function, '__module__', '?')}.{getattr(function, '__name__', '?')}"
            return f"{where} has no argument {missing[0]}; it takes ({', '.join(present)})"
    return ""


def _unused_globals(modules: Torch) -> str:
    """Rebinding a name changes something only if its caller looks it up as a module global."""
    for name, method in CALLERS.items():
        code = inspect.unwrap(getattr(modules.param_group.FSDPParamGroup, method)).__code__
        if name not in code.co_names:
            return f"torch's FSDPParamGroup.{method} does not call {name}"
    reduce_code = inspect.unwrap(modules.collectives.foreach_reduce).__code__
    if "foreach_reduce_scatter_copy_in" not in reduce_code.co_names:
        return "torch's foreach_reduce does not call foreach_reduce_scatter_copy_in"
    return ""


def _unknown_result(modules: Torch) -> str:
    fields = tuple(getattr(modules.collectives.AllGatherResult, "_fields", ()))
    if fields[: len(RESULT_FIELDS)] != RESULT_FIELDS:
        return f"torch's AllGatherResult has the fields ({', '.join(fields)})"
    return ""
