"""One look for all verbs: help, one sentence for bad input, Ctrl-C that leaves nothing running."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tide import cli, look, units


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_help_fits_and_says_more_than_the_list(verb: str) -> None:
    command = cli.main.get_command(None, verb)  # type: ignore[arg-type,attr-defined]
    text = command.get_help(command.make_context(verb, [], resilient_parsing=True))
    assert max(map(len, text.splitlines())) <= 100
    assert len(text.splitlines()) > 5


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["doctor", "--nothing"], ["doctor", "--timeout", "soon"]]
)
def test_bad_input_is_one_sentence_and_2(tide, arguments: list[str]) -> None:
    done = tide(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1 and lines[0].startswith("tide: ")


def test_a_child_ends_with_all_that_it_started(tmp_path: Path) -> None:
    # The child ignores SIGTERM and has a child of its own.
    program = textwrap.dedent(
        """
        import os, signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(os.getpid(), inner.pid, flush=True)
        time.sleep(60)
        """
    )
    log = tmp_path / "log"
    with look.Child([sys.executable, "-c", program], {}, log) as child:
        deadline = time.monotonic() + 20
        while len(log.read_text().split()) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert child.wait(0) is None
    processes = [int(word) for word in log.read_text().split()]
    assert len(processes) == 2
    assert not any(runs(process) for process in processes)


def runs(process: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
        return state not in "ZX"
    return False


def test_sigterm_leaves_like_ctrl_c(tmp_path: Path) -> None:
    program = (
        "import time\nfrom tide import cli, look\nimport click\n"
        "@click.command()\ndef verb():\n"
        "    try:\n        print('in', flush=True); time.sleep(60)\n"
        "    finally:\n        print('out', flush=True)\n"
        "cli.Verbs.get_command = lambda self, context, name: verb\n"
        "cli.main(['verb'])\n"
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path
        ) as process:
            assert process.stdout is not None and process.stdout.readline() == "in\n"
            os.kill(process.pid, number)
            assert process.stdout.read() == "out\n"
            assert process.wait(20) == cli.INTERRUPTED


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (3 << 30, "3.0 GiB"), (2 << 50, "2048.0 TiB")],
)
def test_sizes(number: int, text: str) -> None:
    assert units.size(number) == text
