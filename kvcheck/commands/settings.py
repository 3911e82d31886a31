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
from collections.abc import Collection
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
ALL_TYPED = frozenset({"model", "baseline"})
"""Commands with subcommands read no settings."""
COMMANDS_THAT_MOVED = {
    "run": "schedules are run by kvcheck stress",
    "campaign": "many seeds are run by kvcheck stress --seeds A-B",
    "engine-env": "environments are made by kvcheck env ENGINE==VERSION DIR",
    "reference": "answers of a server are kept by kvcheck model reference URL DIR",
    "config": "settings are KVCHECK_* variables and [tool.kvcheck] in pyproject.toml: docs/settings.md",
    "version": "the version is printed by kvcheck --version",
    "mutate": "edits of kvcheck's own cache are made from a checkout: python -m tools.mutation",
}
"""Former commands of kvcheck, and names that people try, with today's command."""
PLACE = "kvcheck.settings"
"""Key of the file and its table in the context."""


def read_settings(ctx: Any) -> None:
    """Set the variables and defaults of a command's options. Raises UsageError."""
    options = {_name(each): each for each in ctx.command.params if each.param_type_name == "option"}
    for name, option in options.items():
        option.envvar, option.show_envvar = f"{_prefix(ctx.info_name)}{name.upper().replace('-', '_')}", False
    for variable in _variables(ctx.parent).get(ctx.info_name, ()):
        if variable not in (option.envvar for option in options.values()):
            name = variable.removeprefix(_prefix(ctx.info_name)).lower().replace("_", "-")
            raise UsageError(_unknown(variable, ctx.info_name, name, options))
    path, tables = tables_set(ctx.parent)
    values = tables.get(ctx.info_name, {})
    place = ctx.meta[PLACE] = f"{path}: [{_table(path, ctx.info_name)}]"
    for name in values:
        if name not in options:
            raise UsageError(_unknown(f"{place} {name}", ctx.info_name, name, options))
    ctx.default_map = {
        options[name].name: _value(value, options[name], f"{place} {name}") for name, value in values.items()
    }


def tables_set(root: Any) -> tuple[Path, dict[str, dict[str, object]]]:
    """Return the settings file and its options by command. Raises UsageError for a wrong name in any table."""
    path = _file(root.params["config"])
    if path is None:
        return Path(), {}
    found: dict[str, dict[str, object]] = {}
    for name, table in (_tables(path) or {}).items():
        place = f"{path}: [{_table(path, name)}]"
        command = _command(name, place, root)
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {_table(path, name)}: expected a table, [{_table(path, name)}], got {table!r}")
        found[command] = {key.replace("_", "-"): value for key, value in table.items()}
        if personal := sorted(PERSONAL & {*found[command]}):
            raise UsageError(f"{place} {personal[0]}: no file may set it; type --{personal[0]} on the command line")
    return path, found


def check_settings(root: Any) -> None:
    """Raise UsageError for a setting of no command, or of one that reads none."""
    _variables(root)
    tables_set(root)


def _variables(root: Any) -> dict[str, list[str]]:
    commands = sorted(root.command.list_commands(root), key=len, reverse=True)  # bench serve before bench
    found: dict[str, list[str]] = {}
    for variable in sorted(os.environ):
        if variable.startswith(PREFIX) and variable != CONFIG:
            command = next((each for each in commands if variable.startswith(_prefix(each))), None)
            word = variable.removeprefix(PREFIX).partition("_")[0].lower() if command is None else command
            found.setdefault(_command(word.replace(" ", "-"), variable, root), []).append(variable)
    return found


def _command(name: str, place: str, root: Any) -> str:
    """Return the command of a table or variable. Raises UsageError for none, and for one whose options are typed."""
    known: dict[str, str] = {each.replace(" ", "-"): each for each in root.command.list_commands(root)}
    if name in ALL_TYPED:
        raise UsageError(f"{place}: options of kvcheck {name} are only typed; leave it out")
    if name not in known:
        moved = COMMANDS_THAT_MOVED.get(name)
        raise UsageError(f"{place}: no command {name!r}{f'; {moved}' if moved else did_you_mean(name, known)}")
    return known[name]


def words_set(ctx: Any) -> list[str]:
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
    source = ctx.get_parameter_source(option.name)
    if source is None or source.name not in ("ENVIRONMENT", "DEFAULT_MAP"):
        return None
    return str(option.envvar) if source.name == "ENVIRONMENT" else f"{ctx.meta[PLACE]} {_name(option)}"


def _name(option: Any) -> str:
    return str(next(each for each in option.opts if each.startswith("--")).removeprefix("--"))


def _prefix(command: str) -> str:
    return f"{PREFIX}{command.upper().replace('-', '_').replace(' ', '_')}_"


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


def _table(path: Path, command: str) -> str:
    return ".".join((*(TABLE if path.name == FILE_NAME else ()), command.replace(" ", "-")))


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
