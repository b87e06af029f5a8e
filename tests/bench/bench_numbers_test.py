"""The arithmetic behind `tide bench` and the demonstration's numbers."""

import pytest
from tide import bench, bench_cases


def test_percentile_is_the_smallest_sample_that_enough_do_not_exceed() -> None:
    samples = [float(n) for n in range(20, 0, -1)]
    assert bench.percentile(samples, 0.95) == 19
    assert bench.percentile(samples, 0.5) == 10
    assert bench.percentile([7.0], 0.95) == 7
    assert bench.percentile([1.0, 2.0], 0.95) == 2


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("mib", [1, 32, 64])
def test_block_shapes(world: int, mib: int) -> None:
    shapes = bench_cases.block_shapes(mib << 20, world)
    assert len(shapes) == 9
    gathered = 2 * world * sum(rows * columns for rows, columns in shapes)
    assert 0.6 * (mib << 20) <= gathered <= 1.01 * (mib << 20)
    width = shapes[1][1]
    assert shapes[1] == (width // world, width)
    assert shapes[-1][0] * world == width
    assert shapes[-1][1] == shapes[-2][0] * world


def test_span_runs_from_the_first_start_to_the_last_end() -> None:
    assert bench_cases.span_of([(1.0, 1.5), (1.2, 1.4), (1.1, 1.75)]) == pytest.approx(750)


def test_summaries_replace_samples_at_any_depth() -> None:
    summed = bench.summarize({"gather": {"samples": {"tide": [3.0, 1.0, 2.0]}, "bytes": 7}})
    assert summed["gather"]["bytes"] == 7
    tide = summed["gather"]["samples"]["tide"]
    assert (tide["median_ms"], tide["p95_ms"], tide["least_ms"]) == (2.0, 3.0, 1.0)
    assert tide["samples_ms"] == [3.0, 1.0, 2.0]


def test_savings_are_shares_of_gloo_in_the_same_run() -> None:
    def run(gloo: float, tide: float) -> dict[str, object]:
        return {"communication": {"gloo": {"median_ms": gloo}, "tide": {"median_ms": tide}}}

    step = {"both": run(100, 20), "gather": run(200, 120), "reduce": run(50, 25)}
    saved = bench.savings(step)
    assert saved["both"] == pytest.approx(0.8)
    assert saved["gather"] == pytest.approx(0.4)
    assert saved["reduce"] == pytest.approx(0.5)
    assert saved["gather_plus_reduce"] == pytest.approx(0.9)


def test_the_ranks_words_come_before_the_launchers() -> None:
    text = (
        "[rank1]: ValueError: no\n"
        "E1130 x torch/distributed/elastic/multiprocessing/api.py:1002] failed\n"
        "Traceback of the launcher\n"
    )
    assert bench.ranks_own_words(text) == "[rank1]: ValueError: no"
