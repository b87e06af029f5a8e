"""What all verbs of `tide` share: how they speak, fail, show progress and start programs.

Bad input raises `BadInput`: one sentence on stderr, exit code 2. Text is at most 100 columns wide.
Progress goes to stderr and only after two seconds. Children end with the verb, also at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
PATIENCE_SECONDS = 2.0
COLOURS = {"tide": "#00798c", "stock": "#edae49", "other": "#8d96a3", "bad": "#d1495b"}
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


class BadInput(click.ClickException):
    """What the user gave cannot be worked with; the message is one sentence."""

    exit_code = 2


def console() -> Console:
    from rich.console import Console

    wide = Console()
    return Console(width=min(WIDTH, wide.width) if wide.is_terminal else WIDTH, highlight=False)


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=1))


class Progress:
    """One line on stderr that appears after two seconds; on a terminal it is rewritten in place.

    `update` is cheap: it may be called for every event of a large file.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._start = time.monotonic()
        self._shown = 0.0
        self._terminal = sys.stderr.isatty()

    def update(self, share: float | None = None, note: str = "") -> None:
        """share: of the work, 0 to 1; None where nobody knows."""
        now = time.monotonic()
        interval = 0.2 if self._terminal else 10.0
        if now - self._start < PATIENCE_SECONDS or now - self._shown < interval:
            return
        self._shown = now
        part = f" {share:4.0%}" if share is not None else ""
        text = f"{self._label}{part} {note} ({now - self._start:.0f} s)"[: WIDTH - 1]
        click.echo(f"\r\x1b[K{text}" if self._terminal else text, nl=not self._terminal, err=True)

    def close(self) -> None:
        if self._shown and self._terminal:
            click.echo("\r\x1b[K", nl=False, err=True)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Progress]:
    shown = Progress(label)
    try:
        yield shown
    finally:
        shown.close()


@contextlib.contextmanager
def ticking(label: str) -> Iterator[Progress]:
    """Progress for a call that reports none itself: seconds tick by."""
    over = threading.Event()
    with progress(label) as shown:

        def tick() -> None:
            while not over.wait(0.5):
                shown.update()

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield shown
        finally:
            over.set()
            thread.join()


class Child:
    """A program in a process group of its own, ended with all that it started.

    Leaving the context ends it: SIGTERM, then SIGKILL after five seconds. A verb that gets SIGTERM
    itself leaves its contexts as at Ctrl-C (`main` of tide.cli sees to that).
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def wait(self, seconds: float) -> int | None:
        """The exit status, or None while it still runs after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        for number, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self.process.poll()
                try:
                    os.killpg(self.process.pid, 0)
                except (ProcessLookupError, PermissionError):
                    return
                time.sleep(0.02)


def torchrun(ranks: int, *program: str) -> list[str]:
    """The command that starts `program` (a script or -m module, and its arguments) on so many ranks
    of this host. By address: bare machines do not always know who localhost is."""
    alone = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0")
    launch = (*alone, "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks))
    return [sys.executable, "-m", "torch.distributed.run", *launch, *program]


@contextlib.contextmanager
def figure(path: Path, width: float, height: float, dpi: int = 130) -> Iterator[Any]:
    """A matplotlib figure drawn without a display and written to `path` (its suffix decides)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False}
    with plt.rc_context(style):
        drawn = plt.figure(figsize=(width, height), layout="constrained")
        try:
            yield drawn
            drawn.savefig(path, dpi=dpi)
        finally:
            plt.close(drawn)


def writable(path: Path) -> Path:
    """`path`, once a file can be made there; BadInput where not."""
    if not path.parent.is_dir():
        raise BadInput(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{path} cannot be written")
    return path
