"""The command `tide`: one verb, one module. A verb's module is imported only when it is called."""

from importlib import import_module

import click

VERBS = {
    "bench": ("tide.bench", "Compare tide with gloo on this machine."),
}
"""Verb -> (module with a click command named `command`, one line for `tide --help`)."""


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


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """tide: layout-aware collectives for PyTorch FSDP2."""


if __name__ == "__main__":
    main()
