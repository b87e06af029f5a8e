"""The seam refuses a torch that it does not know, and comes out as it went in."""

from __future__ import annotations

import functools
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from tide import fsdp
from tide.fsdp import probes
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group, _fsdp_state

NAMES = [
    (_fsdp_param_group, "foreach_all_gather"),
    (_fsdp_param_group, "foreach_all_gather_copy_out"),
    (_fsdp_param_group, "foreach_reduce"),
    (_fsdp_collectives, "foreach_reduce_scatter_copy_in"),
    (_fsdp_param_group.FSDPParamGroup, "_to_sharded"),
    (_fsdp_state.FSDPState, "_lazy_init"),
]


@pytest.fixture(autouse=True)
def taken_out() -> Any:
    fsdp.uninstall()
    yield
    fsdp.uninstall()


def test_this_torch_is_known() -> None:
    assert probes.refusal(probes.load()) == ""


def test_an_unknown_minor_is_refused_unless_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = probes.refusal(probes.load(), "9.1.0")
    assert "torch 9.1 is not one of the versions" in reason and "TIDE_FSDP_FORCE" in reason
    monkeypatch.setenv("TIDE_FSDP_FORCE", "1")
    assert probes.refusal(probes.load(), "9.1.0") == ""


def test_installing_twice_is_installing_once() -> None:
    before = [getattr(owner, name) for owner, name in NAMES]
    assert fsdp.install()
    first = [getattr(owner, name) for owner, name in NAMES]
    assert all(a is not b for a, b in zip(before, first, strict=True))
    assert fsdp.install()
    assert [getattr(owner, name) for owner, name in NAMES] == first
    fsdp.uninstall()
    assert [getattr(owner, name) for owner, name in NAMES] == before
    assert not fsdp.installed()


def test_another_patch_stays_below_and_above(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stood there before is called; what was put on top survives our leaving."""
    stock = _fsdp_param_group.foreach_all_gather
    seen: list[str] = []

    @functools.wraps(stock)
    def below(*args: Any, **kwargs: Any) -> Any:
        seen.append("below")
        return "result"

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", below)
    assert fsdp.install()
    ours = _fsdp_param_group.foreach_all_gather

    @functools.wraps(ours)
    def above(*args: Any, **kwargs: Any) -> Any:
        seen.append("above")
        return ours(*args, **kwargs)

    monkeypatch.setattr(_fsdp_param_group, "foreach_all_gather", above)
    arguments = dict.fromkeys(probes.GATHER_ARGUMENTS)
    assert _fsdp_param_group.foreach_all_gather(**arguments) == "result"
    assert seen == ["above", "below"]
    fsdp.uninstall()
    assert _fsdp_param_group.foreach_all_gather is above
    assert _fsdp_param_group.foreach_all_gather(**arguments) == "result"
    assert fsdp.install()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("no_reduce", "have no foreach_reduce"),
        ("other_arguments", "has no argument all_gather_comm"),
        ("no_lazy_init", "FSDPState has no _lazy_init"),
        ("no_method", "FSDPParamGroup has no finalize_backward"),
        ("not_called", "does not call foreach_all_gather"),
        ("other_result", "AllGatherResult has the fields"),
    ],
)
def test_a_torch_that_looks_different_is_refused(change: str, sentence: str) -> None:
    modules = probes.load()

    def copy(owner: Any, **changes: Any) -> Any:
        return SimpleNamespace(**{**vars(owner), **changes})

    group, collectives, state = modules.param_group, modules.collectives, modules.state
    if change == "no_reduce":
        group = copy(group)
        del group.foreach_reduce
    elif change == "other_arguments":

        def foreach_all_gather(
            fsdp_params: Any,
            group: Any,
            async_op: Any,
            all_gather_copy_in_stream: Any,
            all_gather_stream: Any,
            device: Any,
        ) -> None: ...

        group = copy(group, foreach_all_gather=foreach_all_gather)
    elif change == "no_lazy_init":
        state = copy(state, FSDPState=object)
    elif change == "no_method":
        methods = {n: m for n, m in vars(group.FSDPParamGroup).items() if n != "finalize_backward"}
        group = copy(group, FSDPParamGroup=SimpleNamespace(**methods))
    elif change == "not_called":
        methods = {**vars(group.FSDPParamGroup), "unshard": lambda self: None}
        group = copy(group, FSDPParamGroup=SimpleNamespace(**methods))
    else:
        collectives = copy(collectives, AllGatherResult=SimpleNamespace(_fields=("other",)))
    changed = probes.Torch(group, collectives, modules.param, state)
    assert sentence in probes.refusal(changed)


def test_arguments_are_read_by_name() -> None:
    def function(a: int, b: int, c: int = 3, *, d: int = 4) -> None: ...

    arguments = probes.Arguments(function)
    assert [arguments.get(name, (1,), {"b": 2}) for name in "abcd"] == [1, 2, 3, 4]
    assert arguments.get("d", (1, 2, 9), {"d": 8}) == 8
    assert arguments.get("c", (1, 2, 9), {}) == 9
    assert "d" in arguments and "e" not in arguments


def test_the_seam_can_be_imported_before_torch_distributed() -> None:
    """A process that never makes a tide group is left alone."""
    program = (
        "import tide; from torch.distributed.fsdp._fully_shard import _fsdp_param_group as g;"
        "assert g.foreach_all_gather.__module__.startswith('torch.')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
