"""Settings: options from variables and from a project's pyproject.toml, as words of the command line.

    flag  >  KVCHECK_STRESS_MAX_TIME  >  --config FILE  >  [tool.kvcheck.stress] max-time  >  default

Invariants:
- They become words before those that were typed, so a record's command and its repetition name them all.
- A name that no option has is an error with its place. So is one that only a person may set.
- What sends a secret or lets others in is never taken from a file, which may be somebody else's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.misspelt import did_you_mean

FILE_NAME = "pyproject.toml"
TABLE = ("tool", "kvcheck")
PREFIX = "KVCHECK_"
CONFIG = f"{PREFIX}CONFIG"
"""Names the file; empty: none is read."""
PERSONAL = frozenset({"admin", "allow-remote", "key-env"})
"""Options that no file may set: what they allow is for whoever runs the command to say."""
TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of one option of a command. option: its name without dashes in front, such as max-time.

    value: as TOML has it, or a text. place: where it is set, for people. rank: of its kind of place; the highest wins.
    """

    command: str
    option: str
    value: object
    place: str
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a command. on, off: how it is written; off is None where it takes a value, or cannot be undone.

    takes: "flag", "list" or "value". kind: the parser's name of the type of one value.
    """

    name: str
    key: str
    on: str
    off: str | None
    takes: str
    kind: str


def options_of(parameters: Sequence[Any]) -> dict[str, Option]:
    """The options among a command's parameters, by name. parameters: as the parser has them."""
    found: dict[str, Option] = {}
    for each in parameters:
        long = [text for text in each.opts if text.startswith("--")]
        if each.param_type_name != "option" or not long or long[0] == "--help":
            continue
        takes = "flag" if each.is_flag else "list" if each.multiple else "value"
        off = each.secondary_opts[0] if each.secondary_opts else None
        name = long[0].removeprefix("--")
        option = Option(name=name, key=each.name, on=long[0], off=off, takes=takes, kind=_kind(each))
        found[option.name] = option
    return found


def _kind(parameter: Any) -> str:
    """The name of its type; Typer has kept it in two places."""
    descriptor = getattr(parameter, "type_descriptor", None)
    given = getattr(parameter, "type", None) if descriptor is None else descriptor.annotation
    return str(getattr(given, "name", None) or getattr(given, "__name__", ""))


def file_of(named: str | None, environment: Mapping[str, str], here: Path) -> Path | None:
    """The file with settings: the one that --config or the variable names, else that of the project around `here`.

    Raises UsageError if a file that was named is not there.
    """
    asked = named if named is not None else environment.get(CONFIG)
    if asked is not None:
        if not asked:
            return None
        path = Path(asked)
        if not path.is_file():
            raise UsageError(
                f"{'--config' if named is not None else CONFIG}: expected a TOML file, found none at {asked}"
            )
        return path
    for folder in (here, *here.parents):
        path = folder / FILE_NAME
        if path.is_file() and _inside(path, _loaded(path)) is not None:
            return path
    return None


def settings_of_file(path: Path, commands: Collection[str]) -> tuple[Setting, ...]:
    """All settings of a file. Raises UsageError with their place.

    A pyproject.toml has them under [tool.kvcheck.COMMAND], any other file under [COMMAND].
    """
    loaded = _loaded(path)
    is_project = path.name == FILE_NAME
    tables = _inside(path, loaded) if is_project else loaded
    before = ".".join((*TABLE, "")) if is_project else ""
    found: list[Setting] = []
    for command, table in (tables or {}).items():
        if command not in commands:
            hint = did_you_mean(command, commands)
            raise UsageError(f"{path}: [{before}{command}]: kvcheck has no such command{hint}")
        if not isinstance(table, dict):
            raise UsageError(f"{path}: {before}{command}: expected a table, [{before}{command}], got {table!r}")
        for key, value in table.items():
            option = key.replace("_", "-")
            place = f"{path}: [{before}{command}] {key}"
            if option in PERSONAL:
                raise UsageError(f"{place}: no file may set it; say --{option} on the command line")
            found.append(Setting(command=command, option=option, value=value, place=place, rank=1))
    return tuple(found)


def settings_of_environment(environment: Mapping[str, str], commands: Collection[str]) -> tuple[Setting, ...]:
    """All settings among the variables: KVCHECK_, the command's name, _ and the option's. Others are not kvcheck's."""
    found: list[Setting] = []
    for name, value in sorted(environment.items()):
        for command in commands:
            before = f"{PREFIX}{command.upper().replace('-', '_')}_"
            if name.startswith(before) and name != before:
                option = name.removeprefix(before).lower().replace("_", "-")
                found.append(Setting(command=command, option=option, value=value, place=name, rank=2))
    return tuple(found)


def check_names(settings: Sequence[Setting], command: str, options: Collection[str]) -> None:
    """Raise UsageError for a setting of this command that names no option of it."""
    for each in settings:
        if each.command == command and each.option not in options:
            hint = did_you_mean(each.option, options)
            raise UsageError(f"{each.place}: kvcheck {command} has no option --{each.option}{hint}")


def winners(settings: Sequence[Setting], command: str) -> dict[str, Setting]:
    """By option, the setting of this command that counts."""
    own = [each for each in settings if each.command == command]
    return {each.option: each for each in sorted(own, key=lambda each: each.rank)}


def words_of(setting: Setting, option: Option) -> list[str]:
    """The words that say it on the command line. Raises UsageError for a value of another kind."""
    if option.takes == "flag":
        is_on = _truth(setting, option)
        return [option.on] if is_on else [option.off] if option.off is not None else []
    values = _values(setting, option)
    return [f"{option.on}={each}" for each in values]


def _truth(setting: Setting, option: Option) -> bool:
    text = str(setting.value).lower()
    if not isinstance(setting.value, bool | str) or text not in (*TRUE, *FALSE):
        raise UsageError(f"{setting.place}: expected true or false for {option.on}, got {setting.value!r}")
    return text in TRUE


def _values(setting: Setting, option: Option) -> Iterator[str]:
    given = setting.value
    if option.takes == "list" and isinstance(given, str) and setting.rank == 2:
        given = [each.strip() for each in given.split(",") if each.strip()]
    is_list = isinstance(given, list)
    if is_list and option.takes != "list":
        raise UsageError(f"{setting.place}: expected one value for {option.on}, got {given!r}")
    for each in given if isinstance(given, list) else [given]:
        if isinstance(each, bool) or not isinstance(each, str | int | float):
            raise UsageError(f"{setting.place}: expected a text or a number for {option.on}, got {each!r}")
        yield str(each)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"cannot read settings from {path}: {why_unread(error)}; expected a TOML file") from error


def _inside(path: Path, loaded: Mapping[str, Any]) -> dict[str, Any] | None:
    """The table [tool.kvcheck]; None where there is none. Raises UsageError where the name holds something else."""
    tool = loaded.get(TABLE[0])
    found = tool.get(TABLE[1]) if isinstance(tool, dict) else None
    if found is not None and not isinstance(found, dict):
        raise UsageError(f"{path}: [{TABLE[0]}] {TABLE[1]}: expected a table, [{'.'.join(TABLE)}], got {found!r}")
    return found
