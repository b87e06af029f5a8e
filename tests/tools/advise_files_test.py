"""`tide advise` on files that are torn, broken, foreign, odd or large."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tide.advise import estimate, read, stream
from tide.look import BadInput

from tests.tools.advise_test import STEP, event, gpu_step, gpu_trace, near, trace


@pytest.mark.parametrize("cut", [0.3, 0.6, 0.95])
@pytest.mark.parametrize("zipped", [False, True])
def test_a_trace_that_ends_early(tmp_path: Path, cut: float, zipped: bool) -> None:
    random.seed(1)
    noise = [event("python_function", f"{random.random()}", 5e12 + i, 1) for i in range(3000)]
    data = trace(gpu_step(5e12, 1) + noise).encode()
    data = gzip.compress(data) if zipped else data
    (tmp_path / "t.json").write_bytes(data[: int(len(data) * cut)])
    result = read(tmp_path / "t.json")
    assert result.resident["gather"] == near(200)
    assert any("ends early" in note for note in result.notes)


def test_an_event_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    text = gpu_trace().replace('"sm90_gemm"', '"sm90\\xgemm"', 1)
    (tmp_path / "t.json").write_text(text)
    result = read(tmp_path / "t.json")
    assert result.notes == ["1 events cannot be read and are left out"]
    assert result.steps == 2 and result.resident["reduce"] == near(100)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no chrome trace"),
        (b"hello", "begins with 'hello'"),
        (b"{}", "no list traceEvents"),
        (b'{"a": [1, 2]}', "no list traceEvents"),
        (b"\x89PNG\r\n\x1a\n", "no chrome trace"),
        (b"\x1f\x8bnot gzip at all", "no chrome trace"),
    ],
)
def test_foreign_files(tide, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(BadInput, match=said):
        read(tmp_path / "t.json")
    if content in (b"", b"hello"):
        done = tide("advise", "t.json")
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1 << 14)
    noise = [event("python_function", "x" * 100, 5e12 + i, 1) for i in range(20000)]
    (tmp_path / "t.json").write_text(trace(gpu_step(5e12, 1) + noise))
    largest = 0
    with stream.Trace(tmp_path / "t.json") as opened:
        for _ in opened.events():
            largest = max(largest, len(opened._buffer))
    assert largest < 4 * (1 << 14)


SPOILED: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("args that are a list", lambda e: {**e, "args": [1]}),
    ("no args", lambda e: {k: v for k, v in e.items() if k != "args"}),
    ("no time", lambda e: {**e, "ts": None}),
    ("a time that is a word", lambda e: {**e, "ts": "soon"}),
    ("a time without end", lambda e: {**e, "ts": float("inf")}),
    ("a time too large", lambda e: {**e, "ts": 10**400}),
    ("a length that is a word", lambda e: {**e, "dur": "long"}),
    ("a name that is a number", lambda e: {**e, "name": 7}),
    ("a kind that is a list", lambda e: {**e, "cat": ["kernel"]}),
    ("a grid that is a number", lambda e: {**e, "args": {"grid": 7, "correlation": -(10**30)}}),
    ("a thread that is a word", lambda e: {**e, "tid": "stream 7"}),
    ("another phase", lambda e: {**e, "ph": "B"}),
    ("no event", lambda e: None),
    ("a list", lambda e: [e]),
]


@pytest.mark.parametrize("spoil", [s for _, s in SPOILED], ids=[name for name, _ in SPOILED])
def test_odd_events_do_no_harm(tmp_path: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
    """Each event once more, spoiled, after the steps: those stay what they are."""
    steps = gpu_step(5e12, 1) + gpu_step(5e12 + STEP, 2)
    later = [spoil(one) for one in gpu_step(5e12 + 2 * STEP, 2)]
    header = {"deviceProperties": [{"numSms": "many"}], "distributedInfo": {"rank": "first"}}
    (tmp_path / "t.json").write_text(trace(steps + later, **header))
    result = read(tmp_path / "t.json")
    assert result.rank is None and result.steps == 2
    assert result.resident["gather"] == near(200) and result.copies["chunk_cat"] == near(50)


def test_numbers_in_quotes(tmp_path: Path) -> None:
    quoted = [{**e, "ts": str(e["ts"]), "dur": str(e["dur"])} for e in gpu_step(5e12, 1)]
    (tmp_path / "plain.json").write_text(trace(gpu_step(5e12, 1)))
    (tmp_path / "quoted.json").write_text(trace(quoted))
    assert read(tmp_path / "quoted.json").resident == read(tmp_path / "plain.json").resident


def test_gzip_of_several_members_and_padding(tmp_path: Path) -> None:
    data = gpu_trace().encode()
    members = gzip.compress(data[:2000]) + gzip.compress(data[2000:]) + bytes(512)
    (tmp_path / "t.json.gz").write_bytes(members)
    result = read(tmp_path / "t.json.gz")
    assert result.steps == 2 and result.notes == []


def test_gzip_that_breaks_off_gives_what_comes_before(tmp_path: Path) -> None:
    random.seed(2)
    noise = [event("python_function", f"{random.random()}", 5e12 + i, 1) for i in range(2000)]
    zipped = bytearray(gzip.compress(trace(gpu_step(5e12, 1) + noise).encode()))
    at = len(zipped) * 3 // 4
    zipped[at : at + 64] = bytes(64)
    (tmp_path / "t.json.gz").write_bytes(zipped)
    result = read(tmp_path / "t.json.gz")
    assert result.resident["gather"] == near(200)
    assert any("ends early" in note for note in result.notes)


PEAK = """
import resource, sys
from pathlib import Path
from tide.advise import read
read(Path(sys.argv[1]))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
result = read(Path(sys.argv[2]))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(result.steps, round(result.resident["gather"] * 1e6), (after - before) * 1024)
"""


def peak(tmp_path: Path, large: Path) -> tuple[int, int, int]:
    """Steps, microseconds of gathers a step, and bytes that reading takes at the peak, in a process
    that has read a small trace."""
    (tmp_path / "small.json").write_text(gpu_trace())
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "small.json"), str(large)],
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    steps, gathers, grown = map(int, done.stdout.split())
    return steps, gathers, grown


@pytest.mark.parametrize("zipped", [False, True])
def test_200_megabytes_are_read_in_a_few(tmp_path: Path, zipped: bool) -> None:
    """Memory for what is read at once (a gzip file gives more of it) and a few numbers of each
    kernel; nothing of the rest stays."""
    path = tmp_path / ("t.json.gz" if zipped else "t.json")
    frames = [event("python_function", "torch/nn/" + "x" * 90, 5e12, 1) for _ in range(1000)]
    noise = (json.dumps(frames, indent=1)[1:-1] + ",").encode()
    written, steps = 0, 0
    with gzip.open(path, "wb", 1) if zipped else path.open("wb") as file:
        file.write(b'{"schemaVersion": 1, "traceEvents": [')
        while written < 200e6:
            for _ in range(5):
                file.write(noise)
                written += len(noise)
            file.write((json.dumps(gpu_step(5e12 + steps * STEP, steps))[1:-1] + ",").encode())
            steps += 1
        file.write(b"{}]}")
    found, gathers, grown = peak(tmp_path, path)
    assert (found, gathers) == (steps, 200)
    assert grown < (50e6 if zipped else 10e6), grown


def test_a_small_file_that_unzips_to_a_string_without_end(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "t.json.gz", "wb") as file:
        file.write(json.dumps({"traceEvents": gpu_step(5e12, 1)}).encode()[:-2] + b',{"name": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
    steps, gathers, grown = peak(tmp_path, tmp_path / "t.json.gz")
    assert (steps, gathers) == (1, 200)
    assert grown < 4 * stream.LARGEST_VALUE


GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgs)"
STORAGE = "(ncclDevKernelArgsStorage<4096ul>)"
FORMS: dict[str, tuple[str, list[tuple[str, str, str]], str, str]] = {
    # form: (category of kernels, [(kernel, its "Collective name", kind)], device, what is said)
    "torch 1, V100, capital categories": (
        "Kernel",
        [
            ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", "", "all-reduce"),
            ("ncclKernel_Broadcast_RING_LL_Sum_int8_t(ncclWorkElem)", "", "broadcast"),
        ],
        "Tesla V100-SXM2-32GB",
        "all-reduce",
    ),
    "A100 with send and receive": (
        "kernel",
        [
            ("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*)", "", "send and receive"),
            ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", "", "gather"),
        ],
        "NVIDIA A100-SXM4-40GB",
        "send and receive",
    ),
    "AMD, one kernel for all collectives": (
        "kernel",
        [
            (GENERIC, "_reduce_scatter_base", "reduce"),
            (GENERIC, "_allgather_base", "gather"),
            (GENERIC, "all_to_allv", "all-to-all"),
        ],
        "AMD Instinct MI250X",
        "tide serves CPUs and NVIDIA GPUs",
    ),
    "torch 2.15, H200": (
        "kernel",
        [
            (f"ncclDevKernel_AllGather_RING_LL{STORAGE}", "_allgather_base", "gather"),
            (f"ncclDevKernel_ReduceScatter_Sum_f32_RING_LL{STORAGE}", "", "reduce"),
            ("ncclSymkDevKernel_AllGather_LLMC", "", "gather"),
        ],
        "NVIDIA H200",
        "",
    ),
}


@pytest.mark.parametrize("form", list(FORMS))
def test_forms_of_public_traces(tmp_path: Path, form: str) -> None:
    """A few kernels each, 10 us one after another, under a header of their time."""
    category, kernels, device, said = FORMS[form]
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "ts": 5e12, "args": {"name": "p"}},
        {"ph": "s", "id": 1, "pid": 0, "tid": 0, "ts": 5e12, "cat": "ac2g", "name": "ac2g"},
        event("user_annotation", "ProfilerStep#9", 5e12, 100),
    ]
    for at, (name, collective, _) in enumerate(kernels):
        told = {"Collective name": collective} if collective else {}
        events.append(event(category, name, 5e12 + 20 * at, 10, **told))
        events.append(event(category, "void at::native::vectorized_kernel", 5e12 + 90, 5))
    header = {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1727810000000000000,
        "deviceProperties": [{"id": 0, "name": device, "numSms": 80}],
        "distributedInfo": {"backend": "nccl", "rank": 1, "world_size": 2},
        "trace_id": "9BF6",
    }
    (tmp_path / "t.json").write_text(trace(events, **header))
    result = read(tmp_path / "t.json")
    wanted = {kind: 10.0 * n for kind, n in Counter(kind for _, _, kind in kernels).items()}
    found = {kind: seconds * 1e6 for kind, seconds in result.resident.items()}
    assert found == pytest.approx(wanted, rel=1e-3)
    assert result.on_gpu and result.device == device and result.steps == 1
    assert estimate.verdict(result, estimate.gain(result), 0.03)[0] == "nothing"
    assert said in " ".join(estimate.not_served(result))


def test_fsdp1_is_named(tmp_path: Path) -> None:
    events = [
        event("user_annotation", "FullyShardedDataParallel.forward", 0, 100),
        event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 10, 20),
    ]
    (tmp_path / "t.json").write_text(trace(events))
    result = read(tmp_path / "t.json")
    assert result.fsdp1 and not result.fsdp2
    assert "FSDP1" in " ".join(estimate.not_served(result))
