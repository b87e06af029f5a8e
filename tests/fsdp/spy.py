"""Watches the calls that the seam makes on tide backends, in one rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tide import _C


@dataclass
class Call:
    name: str  # "gather", "vacate" or "reduce"
    plan: int
    arguments: tuple[Any, ...] = ()  # kept only while `on_call` runs
    work: Any = None  # as long; a work holds tensors
    slot: int = -1  # that a gather got


@dataclass
class Spy:
    calls: list[Call] = field(default_factory=list)
    on_call: Callable[[Call], None] | None = None  # before the backend sees the call
    on_return: Callable[[Call], None] | None = None
    replace: Callable[[Call], Any] | None = None  # another work for the seam; None: the real one

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]


@contextlib.contextmanager
def watching() -> Iterator[Spy]:
    spy = Spy()
    stock = {name: getattr(_C.Backend, name) for name in ("gather", "vacate", "reduce")}

    def watched(name: str) -> Callable[..., Any]:
        def call(self: Any, plan: int, *arguments: Any) -> Any:
            seen = Call(name, plan, arguments)
            spy.calls.append(seen)
            if spy.on_call is not None:
                spy.on_call(seen)
            seen.work = stock[name](self, plan, *arguments)
            if spy.on_return is not None:
                spy.on_return(seen)
            work = seen.work
            seen.slot = work.slot if name == "gather" and work is not None else -1
            other = spy.replace(seen) if spy.replace is not None else None
            seen.arguments, seen.work = (), None
            return other if other is not None else work

        return call

    try:
        for name in stock:
            setattr(_C.Backend, name, watched(name))
        yield spy
    finally:
        for name, function in stock.items():
            setattr(_C.Backend, name, function)
