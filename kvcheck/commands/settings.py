"""Settings: options set by variables or by a project's pyproject.toml.

    flag  >  KVCHECK_STRESS_MAX_TIME  >  --config FILE  >  [tool.kvcheck.stress] max-time  >  default

Invariants:
- The parser reads them: a variable is the `envvar` of an option, a file the `default_map` of a command.
- An unknown option, or a personal one in a file, is an error with its place.
- Options that send a secret or grant access never come from a file, which may be somebody else's.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.registry import did_you_mean

FILE_NAME = "pyproject.toml"
TABLE = ("tool", "kvcheck")
PREFIX = "KVCHECK_"
CONFIG = f"{PREFIX}CONFIG"
"""Variable with the path of the file; empty: none is read."""
PERSONAL = frozenset({"admin", "allow-remote", "key-env"})
"""Options that no file may set: the user of the command alone decides on their risks."""
PLACE = "kvcheck.settings"
"""Key of the file and its table in the context."""


def read_settings(ctx: Any) -> None:
    options = {_name(each): each for each in ctx.command.params if each.param_type_name == "option"}
    commands = ctx.parent.command.list_commands(ctx.parent)
    for name, option in options.items():
        option.envvar, option.show_envvar = f"{_prefix(ctx.info_name)}{name.upper().replace('-', '_')}", False
    _check_variables(ctx.info_name, options, commands)
    path = _file(ctx.parent.params["config"])
    if path is not None:
        table, values = _table_of(path, ctx.info_name, commands)
        place = ctx.meta[PLACE] = f"{path}: [{table}]"
        for name in values:
            if name not in options:
                raise UsageError(_unknown(f"{place} {name}", ctx.info_name, name, options))
        ctx.default_map = {
            options[name].name: _value(value, options[name], f"{place} {name}") for name, value in values.items()
        }


def words_set(ctx: Any) -> list[str]:
    """Return the command line words that stand for settings."""
    words: list[str] = []
    for each in ctx.command.params:
        if place_of(ctx, each) is None:
            continue
        value = ctx.params[each.name]
        if isinstance(value, bool):
            words += [each.opts[0]] if value else each.secondary_opts[:1]
        else:
            values = value if isinstance(value, list | tuple) else [value]
            words += [f"{each.opts[0]}={one}" for one in values]
    return words


def place_of(ctx: Any, option: Any) -> str | None:
    """Return the place of a setting; None for a typed or default value."""
    source = ctx.get_parameter_source(option.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return None
    return str(option.envvar) if source.name == "ENVIRONMENT" else f"{ctx.meta[PLACE]} {_name(option)}"


def _name(option: Any) -> str:
    return str(next(each for each in option.opts if each.startswith("--")).removeprefix("--"))


def _prefix(command: str) -> str:
    return f"{PREFIX}{command.upper().replace('-', '_').replace(' ', '_')}_"


def _check_variables(command: str, options: Mapping[str, Any], commands: Collection[str]) -> None:
    begins = _prefix(command)
    longer = tuple(_prefix(each) for each in commands if each.startswith(f"{command} "))
    known = {option.envvar for option in options.values()}
    for variable in sorted(os.environ):
        if variable.startswith(begins) and variable not in known and not variable.startswith(longer or ("\n",)):
            name = variable.removeprefix(begins).lower().replace("_", "-")
            raise UsageError(_unknown(variable, command, name, options))


def _unknown(place: str, command: str, name: str, options: Collection[str]) -> str:
    return f"{place}: kvcheck {command} has no option --{name}{did_you_mean(name, options)}"


def _value(value: object, option: Any, place: str) -> object:
    """Return texts for the parser, so that true is no number. Raises UsageError."""
    if isinstance(value, list) and not option.multiple:
        raise UsageError(f"{place}: expected one value for {option.opts[0]}, got {value!r}")
    texts = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, str | int | float):
            raise UsageError(f"{place}: expected a text or a number for {option.opts[0]}, got {each!r}")
        texts.append(str(each).lower() if isinstance(each, bool) else str(each))
    return texts if option.multiple else texts[0]


def _file(named: str | None) -> Path | None:
    """Return the settings file of --config, of the variable, or of the project around. Raises UsageError."""
    asked = named if named is not None else os.environ.get(CONFIG)
    if asked is not None:
        path = Path(asked)
        if asked and not path.is_file():
            by = CONFIG if named is None else "--config"
            raise UsageError(f"{by}: expected a TOML file, found none at {asked}")
        return path if asked else None
    here = Path.cwd()
    files = (folder / FILE_NAME for folder in (here, *here.parents))
    return next((path for path in files if path.is_file() and _tables(path) is not None), None)


def _table_of(path: Path, command: str, commands: Collection[str]) -> tuple[str, dict[str, object]]:
    """Return name and options of a command's table: under [tool.kvcheck] in a pyproject.toml, else at the top. Raise
    UsageError for a forbidden entry of any table."""
    before = ".".join((*TABLE, "")) if path.name == FILE_NAME else ""
    known = {each.replace(" ", "-"): each for each in commands}
    own: dict[str, object] = {}
    for name, table in (_tables(path) or {}).items():
        if name not in known:
            raise UsageError(f"{path}: [{before}{name}]: kvcheck has no such command{did_you_mean(name, known)}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {before}{name}: expected a table, [{before}{name}], got {table!r}")
        options = {key.replace("_", "-"): value for key, value in table.items()}
        if personal := sorted(PERSONAL & {*options}):
            place = f"{path}: [{before}{name}] {personal[0]}"
            raise UsageError(f"{place}: no file may set it; type --{personal[0]} on the command line")
        if known[name] == command:
            own = options
    return f"{before}{command.replace(' ', '-')}", own


def _tables(path: Path) -> dict[str, Any] | None:
    try:
        loaded: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read settings from {path}: {why_unread(error)}; expected a TOML file") from error
    if path.name != FILE_NAME:
        return dict(loaded)
    tool = loaded.get(TABLE[0])
    found = tool.get(TABLE[1]) if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{path}: [{TABLE[0]}] {TABLE[1]}: expected a table, [{'.'.join(TABLE)}], got {found!r}")
    return found
