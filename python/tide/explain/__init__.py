"""`tide explain`: from the flight records of a launch, in words, which rank everyone waited for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from tide import look


@click.command("explain")
@click.argument("dumps", nargs=-1, required=True, type=click.Path(path_type=Path))
@look.json_option
def command(dumps: tuple[Path, ...], as_json: bool) -> int:
    """Which rank everyone waited for, and in which call: reads tide's flight records.

    DUMPS are the files that ranks wrote on an error or at TIDE_DUMP_SIGNAL (TIDE_DUMP says where;
    by default /tmp/tide_trace_rank_N); a folder stands for the tide_trace_rank_* in it. Not all
    ranks' files are needed: a rank without one is named. PyTorch's own records beside them are left
    to torchfrtrace.

    \b
        tide explain /tmp/tide_trace_rank_*
    """
    from tide.explain import words

    found, foreign = read(dumps)
    if not found:
        what = f"{foreign[0]} is not a flight record of tide" if foreign else "no flight record"
        raise look.BadInput(f"{what}: give the files that ranks wrote (tide_trace_rank_N)")
    stories = words.explain(found)
    if as_json:
        look.print_json({"groups": stories, "left_out": [str(path) for path in foreign]})
        return 0
    for story in stories:
        click.echo(f"group '{story['group']}', {story['ranks']} ranks")
        for sentence in story["sentences"]:
            click.echo(words.wrapped(sentence))
    for path in foreign:
        click.echo(f"left out: {path} is not a flight record of tide")
    return 0


def read(dumps: tuple[Path, ...]) -> tuple[list[dict[str, Any]], list[Path]]:
    paths: list[Path] = []
    for path in dumps:
        if path.is_dir():
            paths += sorted(path.glob("tide_trace_rank_*"))
        elif path.is_file():
            paths.append(path)
        else:
            raise look.BadInput(f"there is no file {path}")
    found, foreign = [], []
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            content = None
        if is_dump(content):
            found.append(content)
        else:
            foreign.append(path)
    return found, foreign


def is_dump(content: Any) -> bool:
    """Whether it has what `words` reads."""
    if not isinstance(content, dict) or "tide" not in content:
        return False
    groups = content.get("groups")
    return isinstance(groups, list) and all(map(is_record, groups))


def is_record(record: Any) -> bool:
    if not isinstance(record, dict) or not isinstance(record.get("group"), str):
        return False
    calls = record.get("operations")
    return (
        all(type(record.get(name)) is int for name in ("rank", "ranks"))
        and isinstance(record.get("error"), str | None)
        and isinstance(calls, list)
        and all(map(is_call, calls))
    )


def is_call(call: Any) -> bool:
    return (
        isinstance(call, dict)
        and all(isinstance(call.get(name), str) for name in ("kind", "subject", "state"))
        and all(isinstance(call.get(name), int | float) for name in ("sequence", "microseconds"))
        and all(isinstance(call.get(name), str | None) for name in ("waiting", "error"))
        and all(
            isinstance(call.get(name, 0), int)
            for name in ("longest_for_rank", "waited_microseconds")
        )
    )
