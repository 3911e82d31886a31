"""The parser of a command whose options a project may set: settings become words before those that were typed.

Invariants:
- An option that was typed is left as it was typed, lists too: they are not added to.
- `ctx.obj`, from which a record's command is made, has the words of the settings too.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import typer

from kvcheck.commands.settings import (
    Setting,
    check_names,
    file_of,
    options_of,
    settings_of_environment,
    settings_of_file,
    winners,
    words_of,
)

META = "kvcheck.config"
"""Where the context keeps what --config named."""


def all_settings(named: str | None, commands: Collection[str]) -> tuple[Setting, ...]:
    """Those of the file and of the environment, of all commands. named: by --config. Raises UsageError."""
    path = file_of(named, os.environ, Path.cwd())
    of_file = settings_of_file(path, commands) if path is not None else ()
    return (*of_file, *settings_of_environment(os.environ, commands))


def configure(command: Any, commands: Collection[str]) -> None:
    """Make a command's parser take settings. A command with subcommands has none."""
    parse = command.parse_args

    def parse_args(ctx: Any, arguments: list[str]) -> Any:
        options = options_of(command.params)
        settings = all_settings(ctx.meta.get(META), commands)
        check_names(settings, command.name, options)
        won = winners(settings, command.name)
        typed = _typed(command, ctx, arguments) if won else frozenset()
        used = {options[name].key: each for name, each in won.items() if options[name].key not in typed}
        words = [word for each in used.values() for word in words_of(each, options[each.option])]
        if words:
            ctx.obj[:] = [command.name, *words, *arguments]
        try:
            return parse(ctx, [*words, *arguments])
        except typer.BadParameter as error:
            _name_place(error, used)
            raise

    command.parse_args = parse_args


def _typed(command: Any, ctx: Any, arguments: list[str]) -> frozenset[str]:
    """Names of the parameters that were typed. Words that cannot be parsed are left to the parser, which says why."""
    parser = command.make_parser(ctx)
    parser.ignore_unknown_options = True
    _, _, order = parser.parse_args(list(arguments))
    return frozenset(each.name for each in order)


def _name_place(error: typer.BadParameter, used: dict[str, Setting]) -> None:
    """Say where a value comes from that the parser refuses."""
    name = getattr(error.param, "name", None)
    if name in used:
        error.message = f"{error.message.rstrip('.')}; it is set by {used[name].place}"
