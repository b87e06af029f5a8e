"""One look for all verbs: help, one sentence for bad input, Ctrl-C that leaves nothing running."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
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


def examples() -> list[str]:
    """Every command `tide ...` that the README or a verb's help shows."""
    readme = Path(__file__).parents[2] / "README.md"
    texts = [readme.read_text()]
    for verb in cli.VERBS:
        help_text = cli.main.get_command(None, verb).help  # type: ignore[arg-type,attr-defined]
        texts.append(inspect.cleandoc(help_text or ""))
    shown = re.compile(r"^(?: {4,}|\S.*--no-python )(tide [a-z].*)$", re.MULTILINE)
    return sorted({line for text in texts for line in shown.findall(text)})


def test_examples_are_taken() -> None:
    """Parsed, not run: verbs and options are there."""
    found = examples()
    assert {line.split()[1] for line in found} == set(cli.VERBS)
    for line in found:
        verb, *arguments = shlex.split(line, comments=True)[1:]
        command = cli.main.get_command(None, verb)  # type: ignore[arg-type,attr-defined]
        command.make_context(verb, arguments)


def test_the_readmes_script_is_python() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert any("--profile" in block for block in blocks)
    for block in blocks:
        compile(block, "README.md", "exec")


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


def test_progress_is_shown_after_two_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(look.time, "monotonic", lambda: now[0])
    with look.progress("reading") as shown:
        for seconds, told in (
            (1.9, ""),
            (0.2, "reading  50% half (2 s)"),
            (1, ""),
            (20, "reading"),
        ):
            now[0] += seconds
            shown.update(0.5, "half")
            said = capsys.readouterr()
            assert said.out == ""
            assert told in said.err and bool(said.err) == bool(told)


def test_progress_of_a_call_that_tells_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(look, "PATIENCE_SECONDS", 0.1)
    said = ""
    with look.ticking("simulating"):
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            said = capsys.readouterr().err
            time.sleep(0.05)
    assert "simulating" in said


def test_json_is_json_also_of_what_is_not_finite() -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    value = {"a": [1.5, float("nan"), {"b": -float("inf")}], "c": (float("inf"), "x", True, None)}
    read = json.loads(look.json_text(value), parse_constant=refuse)
    assert read == {"a": [1.5, None, {"b": None}], "c": [None, "x", True, None]}


def test_a_call_that_does_not_listen_is_interrupted() -> None:
    program = (
        "import ctypes\nfrom tide import look\n"
        "print('in', flush=True)\n"
        "look.interruptible(lambda: ctypes.CDLL(None).sleep(60))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "in\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    with pytest.raises(ZeroDivisionError):
        look.interruptible(lambda: 1 // 0)
    assert look.interruptible(lambda: 3) == 3
