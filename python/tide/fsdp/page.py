"""A report as one HTML file that needs no network: tables, and bars drawn by style sheets."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tide.fsdp.report import Report
    from tide.fsdp.steps import Step
    from tide.fsdp.waits import Waits

STYLE = """
body{font:14px system-ui,sans-serif;margin:2em;color:#222}
table{border-collapse:collapse;margin:1em 0}td,th{padding:3px 10px;text-align:right}
th{border-bottom:1px solid #999}td:first-child,th:first-child{text-align:left}
.bar{display:inline-block;height:10px;background:#00798c}
.stock{color:#d1495b}.small{display:inline-block;width:5px;background:#edae49;margin-right:1px}
"""


def page(report: Report) -> str:
    rows = "".join(
        f"<tr class={escape(row.path)}><td>{escape(row.group)}</td><td>{row.path}</td>"
        f"<td>{row.gathered_bytes:,}</td><td>{row.reduced_bytes:,}</td><td>{row.slot}</td>"
        f"<td>{row.staging}</td><td>{row.gathers}+{row.reduces}</td>"
        f"<td>{escape(row.reason)}</td></tr>"
        for row in report.rows
    )
    most = max((time for one in report.waits for time in one.ranks), default=0.0) or 1.0
    waits = "".join(waits_row(one, most) for one in report.waits)
    slowest = max((one.waited for one in report.steps), default=0.0) or 1.0
    steps = "".join(steps_row(one, slowest) for one in report.steps)
    return (
        "<!doctype html><meta charset=utf-8><title>tide.report</title>"
        f"<style>{STYLE}</style><h1>tide.report</h1>"
        f"<p>{len(report.rows)} groups, arena {report.arena_bytes:,} bytes</p>"
        "<table><tr><th>group<th>path<th>gathered bytes<th>reduced bytes<th>slot<th>staging"
        f"<th>calls<th>reason</tr>{rows}</table><h2>Waits of this rank</h2>"
        "<table><tr><th>group<th>kind<th>calls<th>ms in all<th>causes<th>for each rank"
        f"<th>how long (powers of two, us)</tr>{waits}</table>"
        "<h2>Last steps of this rank, the newest last</h2>"
        "<table><tr><th>process group<th>calls<th>ms waited<th>most for rank<th>most in group"
        f"<th>for each rank</tr>{steps}</table>"
    )


def waits_row(one: Waits, most: float) -> str:
    causes = ", ".join(f"{escape(k)} {v * 1e3:.1f} ms" for k, v in one.causes.items())
    bars = "<br>".join(
        f"{rank} <span class=bar style='width:{time / most * 120:.0f}px' "
        f"title='{time * 1e3:.1f} ms'></span>"
        for rank, time in enumerate(one.ranks)
    )
    highest = max(one.histogram, default=0) or 1
    buckets = "".join(
        f"<span class=small style='height:{count / highest * 30:.0f}px' "
        f"title='under {2**bucket} us: {count}'></span>"
        for bucket, count in enumerate(one.histogram)
    )
    return (
        f"<tr><td>{escape(one.group)}</td><td>{one.kind}</td><td>{one.calls}</td>"
        f"<td>{one.seconds * 1e3:.1f}</td><td>{causes}</td><td>{bars}</td><td>{buckets}</td></tr>"
    )


def steps_row(one: Step, most: float) -> str:
    bars = "<br>".join(
        f"{rank} <span class=bar style='width:{time / most * 120:.0f}px' "
        f"title='{time * 1e3:.1f} ms'></span>"
        for rank, time in one.ranks.items()
    )
    latest = "-" if one.latest is None else one.latest
    return (
        f"<tr><td>{escape(one.process_group)}</td><td>{one.calls}</td>"
        f"<td>{one.waited * 1e3:.1f}</td><td>{latest}</td><td>{escape(one.slowest or '-')}</td>"
        f"<td>{bars}</td></tr>"
    )
