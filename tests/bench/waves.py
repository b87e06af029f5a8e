"""Runs `waves` (waves.cu, built by ci/device), keeps its JSON with the machine and paints it.

ci/device waves
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path

import record

PAPER = {
    "places": 33,
    "a: 4 clusters of 4 CTAs stay": "the paper's NCCL: product 69 % slower, operation 6.75 ms",
    "c: 4 single CTAs stay": "NCCL limited to 4 CTAs: 2.7 % slower, operation 26.35 ms",
    "d: tide's sums, 2 + 2 launches": "the paper's own: 2.9 % slower, operation 6.96 ms",
}


def show(report: record.Report) -> None:
    print(f"places for clusters of 4: {report['places']}; a product needs 32")
    print(f"{'beside':34} {'product':>9} {'slower':>7} {'operation, alone':>17} {'CTAs live':>10}")
    for row in report["rows"]:
        operation = "-"
        lives = "-"
        if "operation_alone_ms" in row:
            operation = f"{row['operation_beside_ms']:.2f}, {row['operation_alone_ms']:.2f} ms"
            lives = f"{row['cta_alone_ms']:.2f} ms"
        print(
            f"{row['beside']:34} {row['product_mean_us']:6.1f} us {row['product_slower']:7.1%} "
            f"{operation:>17} {lives:>10}"
        )


def paint(report: record.Report, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["rows"][1:]
    with plt.rc_context(record.PICTURE_STYLE):
        figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
        slower = [100 * row["product_slower"] for row in rows]
        shades = [record.SHADES[0 if row["beside"].startswith("d") else 1] for row in rows]
        axes.barh([row["beside"] for row in rows], slower, color=shades)
        for y, value in enumerate(slower):
            axes.text(value, y, f" {value:.1f} %", va="center")
        axes.invert_yaxis()
        axes.set_xlim(min(0, *slower), 1.15 * max(1, *slower))
        axes.set_xlabel("a product of 32 clusters is slower by, %")
        axes.set_title(f"Beside communication on SMs ({record.note(report)})", loc="left", size=10)
        figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--program", type=Path, required=True)
    parser.add_argument("--image", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("tests/bench/results"))
    chosen = parser.parse_args()
    run = subprocess.run(
        [chosen.program.resolve(), chosen.image], capture_output=True, text=True, timeout=120
    )
    if run.returncode != 0:
        raise SystemExit(f"{chosen.program} ended with status {run.returncode}: {run.stderr}")
    report = record.begin("a product that fills the GPU, beside communication on SMs")
    report |= {"paper": PAPER, **json.loads(run.stdout)}
    show(report)
    record.keep(report, chosen.out / "waves.json")
    paint(report, chosen.out / "waves.png")


if __name__ == "__main__":
    main()
