"""Installs tide into torch's FSDP2 by rebinding a few names, and takes it out again.

Rebound: the three collectives that `FSDPParamGroup` calls by module-global name, the copy-in inside
`foreach_reduce`, and five methods that tell when a root is initialised and when unsharded storages
are released. Each wrapper looks at the call's own objects (comm markers, the group's record) and
hands everything that is not tide's to whatever stood there before, so other patches of the same
names keep working below and above this one.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from tide.fsdp import gather, plan, probes, reduce
from tide.fsdp.record import record_of

logger = logging.getLogger("tide.fsdp")

_Wrapper = Callable[..., Any]
_rebound: list[tuple[Any, str, _Wrapper, _Wrapper]] = []  # owner, name, what stood there, ours
_passive: set[_Wrapper] = set()  # taken out, but others have put wrappers around them
_refusal = ""


def installed() -> bool:
    return bool(_rebound)


def refusal() -> str:
    """Why the seam is not installed in this process; empty when it is, or when nobody asked for it
    yet."""
    return _refusal


def install() -> bool:
    """Rebinds the names once; False when this torch's FSDP2 is not one that tide knows."""
    global _refusal
    if _rebound:
        return True
    modules = probes.load()
    _refusal = probes.refusal(modules)
    if _refusal:
        logger.warning("FSDP2 groups go stock: %s", _refusal)
        return False
    group_module, collectives = modules.param_group, modules.collectives
    _rebind_call(group_module, "foreach_all_gather", gather.all_gather)
    _rebind_call(group_module, "foreach_all_gather_copy_out", gather.copy_out)
    _rebind_call(group_module, "foreach_reduce", functools.partial(_reduce, modules))
    _rebind_call(collectives, "foreach_reduce_scatter_copy_in", reduce.copy_in)
    group_class = group_module.FSDPParamGroup
    for name in ("_to_sharded", "_to_sharded_post_forward"):
        _rebind_method(group_class, name, after=_vacate)
    for name in ("finalize_backward", "_reset_iter_state"):
        if hasattr(group_class, name):
            _rebind_method(group_class, name, before=_drop_pending)
    _rebind_lazy_init(modules)
    return True


def uninstall() -> None:
    """Puts back what stood there, where nobody has rebound the name since; groups already marked
    then run stock."""
    global _refusal
    while _rebound:
        owner, name, before, ours = _rebound.pop()
        if vars(owner).get(name) is ours:
            setattr(owner, name, before)
        else:
            _passive.add(ours)
    _refusal = ""


def _rebind(owner: Any, name: str, before: _Wrapper, ours: _Wrapper) -> None:
    setattr(owner, name, ours)
    _rebound.append((owner, name, before, ours))


def _rebind_call(owner: Any, name: str, serve: Callable[..., Any]) -> None:
    """`serve` gets (what stood there, its argument names, args, kwargs)."""
    before = getattr(owner, name)
    arguments = probes.Arguments(before)

    @functools.wraps(before)
    def ours(*args: Any, **kwargs: Any) -> Any:
        if ours in _passive:
            return before(*args, **kwargs)
        return serve(before, arguments, args, kwargs)

    _rebind(owner, name, before, ours)


def _rebind_method(
    owner: Any,
    name: str,
    before: Callable[[Any], None] | None = None,
    after: Callable[[Any], None] | None = None,
) -> None:
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before(self)
        result = stock(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    _rebind(owner, name, stock, ours)


def _rebind_lazy_init(modules: probes.Torch) -> None:
    state_class = modules.state.FSDPState
    stock = state_class._lazy_init

    @functools.wraps(stock)
    def ours(self: Any) -> Any:
        first = self._is_root is None
        result = stock(self)
        if first and self._is_root and ours not in _passive:
            plan.plan_root(self, modules)
        return result

    _rebind(state_class, "_lazy_init", stock, ours)


def _reduce(modules: probes.Torch, stock: _Wrapper, arguments: Any, args: Any, kwargs: Any) -> Any:
    return reduce.reduce(stock, arguments, modules, args, kwargs)


def _vacate(group: Any) -> None:
    """After a reshard: the slot is free, unless torch was told to keep the storages that are bound
    to it."""
    record = record_of(group)
    if record is None or not record.holds_slot or record.pending is not None:
        return
    if any(t.untyped_storage().size() for p in group.fsdp_params for t in p.all_gather_outputs):
        return
    record.vacate()


def _drop_pending(group: Any) -> None:
    """An unshard that nobody waited for ends here."""
    record = record_of(group)
    if record is not None and record.pending is not None:
        record.pending.drop()
