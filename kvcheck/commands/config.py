"""`kvcheck config`: which settings count here, where they come from, and what may be set.

Invariants:
- It changes nothing. A setting that is wrong is told as the command that would read it tells it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from kvcheck.commands.configured import META, all_settings
from kvcheck.commands.settings import PERSONAL, Option, check_names, options_of, winners, words_of
from kvcheck.commands.terminal import say
from kvcheck.core.base.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

TOML_TYPES = {"int": "integer", "integer": "integer", "float": "number"}
"""Types of JSON Schema, by the parser's; any other one is a string."""


@app.callback(invoke_without_command=True)
def config(ctx: typer.Context) -> None:
    """Subcommands of `kvcheck config`; without one the help is printed, with exit code 2."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit(2)


@app.command()
def show(
    ctx: typer.Context,
    command: Annotated[str | None, typer.Argument(help="A command, such as stress. Default: all.")] = None,
) -> None:
    """Say which settings count in this folder, and which others they beat."""
    known = _options()
    if command is not None and command not in known:
        raise UsageError(f"kvcheck config show: expected one of {', '.join(known)}, got {command!r}")
    settings = all_settings(ctx.meta.get(META), known)
    for name, options in known.items():
        check_names(settings, name, options)
    shown = 0
    for name in known if command is None else (command,):
        won = winners(settings, name)
        for option, each in sorted(won.items()):
            words = " ".join(words_of(each, known[name][option])) or "(off, as by default)"
            say(f" {name:<10} {words:<40} {each.place}")
            for other in settings:
                if (other.command, other.option) == (name, option) and other is not each:
                    say(f" {'':<10} {'  instead of ' + repr(other.value):<40} {other.place}")
            shown += 1
    if not shown:
        say(" no settings: no KVCHECK_ variable of a command, and no [tool.kvcheck] around this folder")


@app.command()
def schema() -> None:
    """Print a JSON Schema of [tool.kvcheck], for editors."""
    tables = {
        name: {
            "type": "object",
            "additionalProperties": False,
            "properties": {option: _type(each) for option, each in options.items() if option not in PERSONAL},
        }
        for name, options in _options().items()
    }
    text = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "[tool.kvcheck]", "type": "object"}
    for line in json.dumps(text | {"additionalProperties": False, "properties": tables}, indent=2).splitlines():
        say(line)


def _type(option: Option) -> dict[str, Any]:
    if option.takes == "flag":
        return {"type": "boolean"}
    one = {"type": TOML_TYPES.get(option.kind, "string")}
    return {"type": "array", "items": one} if option.takes == "list" else one


def _options() -> dict[str, dict[str, Option]]:
    """By command, its options; commands with subcommands have none that can be set."""
    from kvcheck.commands.main import command_named, configurable

    return {name: options_of(command_named(name).params) for name in configurable()}
