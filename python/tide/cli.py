"""The command `tide`: one verb, one module. A verb's module is imported only when it is called."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

VERBS = {
    "advise": ("tide.advise", "What tide could win, from profiler traces of an FSDP2 run."),
    "bench": ("tide.bench", "Compare tide with gloo on this machine."),
    "check": ("tide.check", "Which groups of a model tide would serve, and why not others."),
    "doctor": ("tide.doctor", "What this machine and this launch can do, and why not more."),
    "explain": ("tide.explain", "Which rank everyone waited for, from flight records."),
    "parity": ("tide.parity", "A training script stock twice and on tide once: is it right?"),
    "simulate": ("tide.simulate", "A model's step on a cluster that nobody has to have."),
}
"""Verb -> (module with a click command named `command`, one line for `tide --help`)."""

INTERRUPTED = 130


class Verbs(click.Group):
    def list_commands(self, context: click.Context) -> list[str]:
        return sorted(VERBS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = import_module(VERBS[name][0]).command
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, line) for name, (_, line) in sorted(VERBS.items())])

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> Any:
        """Bad input, and files that cannot be read or written: one sentence and 2. Ctrl-C, SIGTERM
        and SIGHUP (a closed terminal): the verb's contexts are left, then 130."""
        extra["standalone_mode"] = False
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores SIGHUP
                with contextlib.suppress(ValueError):  # not the main thread
                    signal.signal(number, signal.default_int_handler)
        try:
            status = super().main(args, *rest, **extra)
        except click.ClickException as error:
            sentence = " ".join(error.format_message().split())
            click.echo(f"tide: {sentence}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("tide: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except BrokenPipeError:
            # The reader (head, say) has gone; what is left in the buffer has no one to go to.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except OSError as error:
            if error.filename is None and error.errno != errno.ENOSPC:
                raise
            where = f"{error.filename}: " if error.filename is not None else ""
            click.echo(f"tide: {where}{error.strerror}", err=True)
            sys.exit(2)
        sys.exit(status if isinstance(status, int) else 0)


@click.command(
    cls=Verbs,
    no_args_is_help=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.pass_context
def main(context: click.Context) -> None:
    """tide: layout-aware collectives for PyTorch FSDP2."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


if __name__ == "__main__":
    main()
