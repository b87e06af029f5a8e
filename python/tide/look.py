"""What all verbs of `tide` share: how they speak, fail, show progress and start programs.

Bad input raises `BadInput`: one sentence on stderr, exit code 2. Text is at most 100 columns wide.
Progress goes to stderr and only after two seconds. Children end with the verb, also at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from rich.console import Console

Result = TypeVar("Result")
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


def json_text(value: Any) -> str:
    """JSON that every reader takes: what is not finite becomes null."""
    return json.dumps(finite(value), indent=1, allow_nan=False)


def finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_json(value: Any) -> None:
    click.echo(json_text(value))


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


def interruptible(call: Callable[[], Result]) -> Result:
    """What `call` returns or raises. It runs on a thread of its own, so that Ctrl-C ends the verb
    also while it stands in code that does not listen."""
    done: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    if failed:
        raise failed[0]
    return done[0]


class Child:
    """A program, ended with all that it started, also in process groups of their own.

    Leaving the context ends it: SIGTERM, then SIGKILL after five seconds or at the second Ctrl-C. A
    verb that gets SIGTERM or SIGHUP itself leaves its contexts as at Ctrl-C (`main` of tide.cli
    sees to that). What the program started is known by a variable that it inherits.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._mark = f"_TIDE_STARTED_BY={os.getpid()}.{time.monotonic_ns()}"
        name, _, value = self._mark.partition("=")
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                env={**os.environ, **environment, name: value},
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
        gone = False
        try:
            gone = self._gone_after(signal.SIGTERM, 5.0)
        finally:  # also at a second Ctrl-C, which ends the patience and goes on
            if not gone:
                self._gone_after(signal.SIGKILL, 5.0)

    def _gone_after(self, number: signal.Signals, patience: float) -> bool:
        """Signals the process group once and, at SIGKILL, whatever else carries the mark; whether
        all are gone in time."""
        deadline = time.monotonic() + patience
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)
        while left := self._left():
            if number == signal.SIGKILL:
                for process in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _left(self) -> list[int]:
        """The program, until it is reaped, and what carries its mark."""
        own = [self.process.pid] if self.process.poll() is None else []
        marked = [one for one in processes() if self._mark.encode() in environment_of(one)]
        return own + marked


def processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def environment_of(process: int) -> list[bytes]:
    """What a process was started with; nothing where it has ended or is another user's."""
    try:
        return Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


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


PICTURES = (".png", ".svg", ".pdf", ".jpg")


def picture(path: Path) -> Path:
    """`path`, once a picture can be painted there; BadInput where not."""
    if path.suffix.lower() not in PICTURES:
        raise BadInput(f"{path} names no picture: its name ends in one of {', '.join(PICTURES)}")
    return writable(path)


def folder(path: Path) -> Path:
    """`path`, once it is a folder that files can be made in; BadInput where not."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"no folder can be made at {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK | os.X_OK):
        raise BadInput(f"nothing can be written in {path}")
    return path


def writable(path: Path) -> Path:
    """`path`, once a file can be made there; BadInput where not."""
    if not path.parent.is_dir():
        raise BadInput(f"{path} cannot be written: there is no folder {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadInput(f"{path} cannot be written")
    return path
