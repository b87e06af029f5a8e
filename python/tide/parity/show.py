"""What `tide parity` found: a table, JSON, and a picture."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from tide import look, units
from tide.parity import compare
from tide.parity.runs import losses

Json = dict[str, Any]


def judged(found: dict[str, Json], window: int, from_step: int | None) -> Json:
    series = {name: losses(result) for name, result in found.items()}
    steps = sorted(series["stock 1"])
    first = from_step if from_step is not None else steps[len(steps) // 2]
    if first > steps[-1]:
        raise look.BadInput(f"--from-step {first} is past the last logged step, {steps[-1]}")
    window = min(window, max(1, len(steps) // 2))
    yardsticks = tuple(n for n in ("stock 2", "stock, reordered") if n in found)
    verdict = compare.judge(series, "tide", yardsticks, window, first)
    equal = series["stock 1"] == series["stock 2"]
    rows = {
        name: {
            "last_loss": result["losses"][-1][1],
            "distance": compare.distance(series[name], series["stock 1"], window, first),
            "step_seconds": result["step_seconds"],
            "host_bytes": result["host_bytes"],
            "device_bytes": result["device_bytes"],
            "steps": len(result["losses"]),
            "source": result["source"],
        }
        for name, result in found.items()
    }
    return {
        "within": verdict.within,
        "sentence": verdict.sentence,
        "stock_runs_bit_equal": equal,
        "distance": verdict.distance,
        "yardstick": verdict.yardstick,
        "window": window,
        "from_step": first,
        "runs": rows,
    }


def text(result: Json, out: Path) -> str:
    lines = [
        f"{'run':<18} {'steps':>6} {'last loss':>10} {'distance':>9} {'a step':>9} "
        f"{'host memory':>12} {'GPU memory':>11}"
    ]
    for name, row in result["runs"].items():
        device = units.size(row["device_bytes"]) if row["device_bytes"] else "-"
        lines.append(
            f"{name:<18} {row['steps']:>6} {row['last_loss']:>10.5f} {row['distance']:>9.2e} "
            f"{units.duration(row['step_seconds']):>9} {units.size(row['host_bytes']):>12} "
            f"{device:>11}"
        )
    lines.append(
        f"distance: largest difference of the {result['window']}-step mean from stock 1, from step "
        f"{result['from_step']} on"
    )
    if result["stock_runs_bit_equal"]:
        said = "the two stock runs are bit-equal"
        if "stock, reordered" in result["runs"]:
            said += (
                "; the yardstick is a stock run whose gradients are divided first and summed in "
                "another order of ranks"
            )
        lines += textwrap.wrap(said, look.WIDTH)
    lines += textwrap.wrap(result["sentence"], look.WIDTH)
    for failure in result["failed_runs"]:
        lines += textwrap.wrap(f"note: {failure}", look.WIDTH, subsequent_indent="    ")
    lines.append(f"written: {out}/parity.json, {out}/parity.png")
    return "\n".join(lines)


def save(result: Json, found: dict[str, Json], out: Path) -> None:
    (out / "parity.json").write_text(look.json_text(result) + "\n")
    window, first = result["window"], result["from_step"]
    with look.figure(out / "parity.png", 10, 6) as drawn:
        above, below = drawn.subplots(2, 1, sharex=True, height_ratios=[1.4, 1])
        colours = {"tide": look.COLOURS["tide"], "stock 1": look.COLOURS["stock"]}
        reference = compare.moving_means(losses(found["stock 1"]), window, 0)
        for name, run in found.items():
            means = compare.moving_means(losses(run), window, 0)
            colour = colours.get(name)
            above.plot(list(means), list(means.values()), label=name, color=colour, linewidth=1.4)
            common = [step for step in means if step in reference]
            apart = [
                (means[s] - reference[s]) / max(abs(reference[s]), 1e-12) * 100 for s in common
            ]
            below.plot(common, apart, label=name, color=colour, linewidth=1.2)
        below.axvline(first, color="#999999", linewidth=0.8)
        above.set_ylabel(f"loss, {window}-step mean")
        below.set_ylabel("per cent from stock 1")
        below.set_xlabel("step")
        above.set_title(result["sentence"], loc="left", fontsize=10)
        above.legend(frameon=False)
