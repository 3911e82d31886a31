"""Parsers of commands: they read settings, and group the options and examples of the help.

Invariants:
- Options without a heading stand under Options, the last one.
- `ctx.obj`, the source of a record's command, includes the words of the settings.
"""

from __future__ import annotations

import re
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvcheck.commands.settings import read_settings, words_set

TYPES = {"str": "TEXT", "int": "N", "float": "NUMBER", "path": "PATH"}
TYPE = re.compile(rf" <(?:list\[)?({'|'.join(TYPES)})\]?>$")
"""The parser's name of a type, behind the name of an option or argument."""
CONTEXT = {"max_content_width": 100, "help_option_names": ["-h", "--help"]}


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse typed options and settings. Subcommands have no settings."""
        typed = [*args]
        is_set = ctx.parent is not None and "config" in ctx.parent.params and not ctx.resilient_parsing
        if is_set:
            read_settings(ctx)
        left = super().parse_args(ctx, args)
        if is_set and (words := words_set(ctx)):
            ctx.obj[:] = [*ctx.info_name.split(), *words, *typed]
        return left

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        others: list[tuple[str, str]] = []
        for each in self.get_params(ctx):
            if (row := each.get_help_record(ctx)) is None:
                continue
            name, text = row
            if each.param_type_name == "argument":
                sections["Arguments"].append((TYPE.sub("", name), text))
                continue
            row = TYPE.sub(lambda found: f" {TYPES[found[1]]}", name), text
            if (heading := getattr(each, "rich_help_panel", None)) is None:
                others.append(row)
            else:
                sections.setdefault(heading, []).append(row)
        for heading, rows in (*sections.items(), ("Options", others)):
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)


def group() -> typer.Typer:
    """Make a command with subcommands; alone it prints its help and exits 2."""
    app = typer.Typer(
        cls=Group, context_settings=CONTEXT, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )

    @app.callback(invoke_without_command=True)
    def help_alone(ctx: typer.Context) -> None:
        if ctx.invoked_subcommand is None:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)

    return app


class Group(TyperGroup):
    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.help or "") for name, each in self.commands.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        write_examples(self.epilog, formatter)


def write_examples(epilog: str | None, formatter: Any) -> None:
    """Write each example as one unbroken line, to be copied."""
    if epilog:
        with formatter.section("Examples"):
            for each in epilog.split(" | "):
                formatter.write(f"{'':{formatter.current_indent}}{each}\n")
