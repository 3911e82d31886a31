"""Names: what of an engine a probe needs, found by trying where it has been, never by reading a version number.

Invariants:
- A capability is one row: every place that some release had it, in the order in which they are tried.
- What is in none of its places is missing, by name; a place that breaks while it is imported says how.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvcheck.core.targets.engines.guard import CannotDrive, Fault, attempt


@dataclass(frozen=True, slots=True)
class Found:
    """Where a capability is, or why it is nowhere."""

    place: str
    thing: Any
    why_not: str = ""


class Names:
    """The capabilities of the engine that this process can import. table: name -> places "module:attribute"."""

    def __init__(self, table: Mapping[str, tuple[str, ...]]) -> None:
        self._table = table
        self._found: dict[str, Found] = {}

    def __getitem__(self, name: str) -> Any:
        """The thing itself. Raises CannotDrive where no release-known place has it."""
        found = self.find(name)
        if found.why_not:
            raise CannotDrive(f"this release has no {name}: {found.why_not}")
        return found.thing

    def has(self, name: str) -> bool:
        """Whether some place has it."""
        return not self.find(name).why_not

    def require(self, names: tuple[str, ...]) -> None:
        """Raises CannotDrive with every name that is missing."""
        missing = [f"{name} ({self.find(name).why_not})" for name in names if not self.has(name)]
        if missing:
            raise CannotDrive(f"this release has no {'; no '.join(missing)}")

    def find(self, name: str) -> Found:
        """Look in each place once."""
        if name not in self._found:
            self._found[name] = self._look(self._table[name])
        return self._found[name]

    def _look(self, places: tuple[str, ...]) -> Found:
        tried = []
        for place in places:
            module, attribute = place.split(":")
            result = attempt(_getter(module, attribute))
            if not isinstance(result, Fault):
                return Found(place, result)
            tried.append(f"{place}: {result.text}")
        return Found("", None, f"tried {'; '.join(tried)}")


def _getter(module: str, attribute: str) -> Callable[[], Any]:
    """An attribute of a module, which may be an attribute of a class in it."""

    def get() -> Any:
        thing: Any = importlib.import_module(module)
        for part in attribute.split("."):
            thing = getattr(thing, part)
        return thing

    return get
