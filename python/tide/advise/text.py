"""`tide advise` for people."""

from __future__ import annotations

import textwrap

from tide.advise.estimate import Gain
from tide.advise.measure import SERVED, Measured
from tide.look import WIDTH
from tide.units import duration


def report(measured: Measured, won: Gain, said: str, refused: list[str]) -> str:
    """Of the rank whose step is longest."""
    step = measured.step
    lines = [heading(measured)]

    def row(what: str, seconds: float, more: str = "") -> None:
        share = f"{seconds / step:6.1%}" if step else "     -"
        lines.append(f"  {what:<34} {duration(seconds):>10}  {share}  {more}".rstrip())

    row("a step", step)
    for kind, seconds in sorted(measured.copies.items()):
        row(f"layout copies: {kind}", seconds)
    if measured.copies:
        row("  of them nothing hides", measured.exposed_copies)
    for kind, seconds in sorted(measured.resident.items()):
        held = measured.sm_seconds.get(kind)
        row(f"communication: {kind}", seconds, f"{held:.2f} SM*s" if held else "")
        row("  of it exposed", measured.exposed.get(kind, 0.0))
    row("tide could win at most", won.at_most)
    row("tide is expected to win", won.expected)
    worst = sorted(measured.modules.items(), key=lambda m: -sum(m[1].values()))
    if worst:
        lines.append("modules, by what they cost a step (copies, exposed waiting):")
        for name, one in worst[:8]:
            copies, exposed = duration(one["copies"]), duration(one["exposed"])
            lines.append(f"  {name[-50:]:<50} {copies:>10} {exposed:>10}")
        if len(worst) > 8:
            lines.append(f"  and {len(worst) - 8} more (--json has them)")
    for title, sentences in (("tide would not serve", refused), ("note", measured.notes)):
        for sentence in sentences:
            lines += textwrap.wrap(f"{title}: {sentence}", WIDTH, subsequent_indent="    ")
    lines += textwrap.wrap(said, WIDTH)
    return "\n".join(lines)


def heading(measured: Measured) -> str:
    parts = []
    if measured.rank is not None:
        parts.append(f"rank {measured.rank} of {measured.ranks}")
    parts.append((measured.device or ("GPU" if measured.on_gpu else "CPU"))[:40])
    parts.append(f"{measured.steps} step{'s' if measured.steps > 1 else ''}")
    what = ", ".join(parts)
    room = WIDTH - len(what) - 2
    path = measured.path
    return f"{path if len(path) <= room else '…' + path[1 - room :]}, {what}"


def ranks(all_measured: list[Measured]) -> str:
    lines = ["rank        step     copies    exposed  (copies nothing hides, exposed waiting)"]
    for one in all_measured:
        waiting = sum(one.exposed.get(kind, 0.0) for kind in SERVED)
        name = "?" if one.rank is None else str(one.rank)
        times = (
            f"{duration(one.step):>10} {duration(one.exposed_copies):>10} {duration(waiting):>10}"
        )
        lines.append(f"{name:<5} {times}")
    return "\n".join(lines)
