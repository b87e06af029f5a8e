"""Ctrl-C, SIGTERM and a closed terminal, in the middle of every verb that takes its time: it ends
with 130 and one sentence, and nothing that it started lives on. `explain` is over at once;
`simulate` has its own in simulate_test.py."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tide import cli, look

STUBBORN = """
import os, pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
alone = dict(start_new_session=True, stdin=subprocess.DEVNULL)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"], **alone)
pathlib.Path(f"runs.{os.environ.get('RANK', 0)}").touch()
time.sleep(300)
"""


def of_advise(folder: Path) -> list[str]:
    """A file that takes minutes to read and no room on the disk."""
    with (folder / "t.json").open("wb") as file:
        file.write(b'{"traceEvents": [{"ph": "X", "ts": 1}, ')
        file.truncate(200 << 30)
    return ["advise", "t.json"]


def of_check(folder: Path) -> list[str]:
    (folder / "train.py").write_text(STUBBORN)
    return ["check", "train.py"]


def of_parity(folder: Path) -> list[str]:
    (folder / "train.py").write_text(STUBBORN)
    return ["parity", "train.py", "--ranks", "2"]


def of_bench(folder: Path) -> list[str]:
    return ["bench", "--ranks", "2", "--case", "memory", "--seconds", "300"]


def of_doctor(folder: Path) -> list[str]:
    """Rank 0 of two, the other of which never comes."""
    return ["doctor", "--timeout", "300"]


def is_busy(verb: str, folder: Path, said: str) -> bool:
    if verb == "advise":
        return "reading" in said
    if verb == "doctor":
        return (folder / "listens").exists()
    wanted = {"check": "runs.*", "parity": "runs.*", "bench": "tide-bench-*/rank.*"}[verb]
    return len(list(folder.glob(wanted))) >= (1 if verb == "check" else 2)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def listens(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize(
    ("make", "number"),
    [
        (of_advise, signal.SIGINT),
        (of_bench, signal.SIGINT),
        (of_check, signal.SIGINT),
        (of_doctor, signal.SIGINT),
        (of_parity, signal.SIGINT),
        (of_parity, signal.SIGTERM),
        (of_check, signal.SIGHUP),
    ],
)
def test_nothing_lives_on(
    tmp_path: Path, make: Callable[[Path], list[str]], number: signal.Signals
) -> None:
    words = make(tmp_path)
    verb, port = words[0], free_port()
    mark = f"TESTED_BY={os.getpid()}.{time.monotonic_ns()}"
    launch = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment |= {"TESTED_BY": mark.partition("=")[2]} | (launch if verb == "doctor" else {})
    log = tmp_path / "said"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "tide.cli", *words],
            cwd=tmp_path,
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 100
        while not is_busy(verb, tmp_path, log.read_text()) and time.monotonic() < deadline:
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
            if verb == "doctor" and listens(port):
                (tmp_path / "listens").touch()
        assert is_busy(verb, tmp_path, log.read_text()), log.read_text()
        process.send_signal(number)
        assert process.wait(60) == cli.INTERRUPTED, log.read_text()
        assert log.read_text().splitlines()[-1] == "tide: interrupted"
        assert "Traceback" not in log.read_text()
        assert [one for one in look.processes() if mark.encode() in look.environment_of(one)] == []
        assert list(tmp_path.glob("tide-*-*/*")) == []  # no folder of its own is left
    finally:
        for one in look.processes():
            if mark.encode() in look.environment_of(one):
                os.kill(one, signal.SIGKILL)
        process.wait()


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path) -> None:
    """A program that ignores SIGTERM is given five seconds, less at a second Ctrl-C."""
    program = f"""
import signal, sys
from pathlib import Path
from tide import look
with look.Child([sys.executable, "-c", {STUBBORN!r}], {{}}, Path("log")) as child:
    print(child.process.pid, flush=True)
    child.wait(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        while not (tmp_path / "runs.0").exists():
            time.sleep(0.05)
        marked = next(e for e in look.environment_of(child) if e.startswith(b"_TIDE_STARTED_BY="))
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None  # patient still
        process.send_signal(signal.SIGINT)
        assert process.wait(60) != 0
    assert [one for one in look.processes() if marked in look.environment_of(one)] == []
