"""Names: finds an engine's capabilities by trying the places of known releases, in order. No version is read.

A capability that is in none of its places is missing. A place that exists and cannot be imported is an error, with the
exception of the import.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt


@dataclass(frozen=True, slots=True)
class Found:
    """A capability's place, or the reason why it was not found. error: exception of the import of an existing place."""

    place: str
    thing: Any
    why_not: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Absent:
    text: str


class Names:
    """Capabilities of the engine in this process. table: name -> places, each "module:attribute"."""

    def __init__(self, table: Mapping[str, tuple[str, ...]]) -> None:
        self._table = table
        self._found: dict[str, Found] = {}
        self.done_without: dict[str, str] = {}
        """Capabilities that `has` did not find in this schedule, with the places tried."""

    def __getitem__(self, name: str) -> Any:
        """Return the class or function. Raises CannotDrive if no known place has it."""
        self.require((name,))
        return self.find(name).thing

    def has(self, name: str) -> bool:
        why_not = self.find(name).why_not
        if why_not:
            self.done_without[name] = why_not
        return not why_not

    def require(self, names: tuple[str, ...]) -> None:
        """Raise CannotDrive with every name that is missing, broken imports first."""
        found = [self.find(name) for name in names]
        missing = sorted((each for each in found if each.why_not), key=lambda each: not each.error)
        if missing:
            raise CannotDrive("; ".join(each.why_not for each in missing))

    def find(self, name: str) -> Found:
        if name not in self._found:
            self._found[name] = self._look(name, self._table[name])
        return self._found[name]

    def _look(self, name: str, places: tuple[str, ...]) -> Found:
        absent, broken, error = [], [], ""
        for place in places:
            module, attribute = place.split(":")
            result = attempt(_getter(module, attribute))
            if isinstance(result, Absent):
                absent.append(f"{place}: {result.text}")
            elif isinstance(result, Fault):
                broken.append(f"{place}: {result.text}")
                error = error or result.text + (f" (raised in {result.raised_in})" if result.raised_in else "")
            else:
                return Found(place, result)
        if broken:
            return Found("", None, f"{name} cannot be imported: {'; '.join(broken)}", error)
        return Found("", None, f"this release has no {name} (tried {'; '.join(absent)})")


def _getter(module: str, attribute: str) -> Callable[[], Any]:
    def get() -> Any:
        try:
            thing: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the release has the module, but one of its imports is missing
            return Absent(f"{type(error).__name__}: {error}")
        for part in attribute.split("."):
            if not hasattr(thing, part):
                return Absent(f"{getattr(thing, '__name__', module)} has no {part}")
            thing = getattr(thing, part)
        return thing

    return get
