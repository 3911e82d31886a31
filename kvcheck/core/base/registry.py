"""Registry: a literal table of names and objects that are imported when they are loaded.

Invariants:
- An entry is "module:attribute", or that with a sentence for `kvcheck list`.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, TypeVar, cast

from kvcheck.core.base.errors import UsageError

LISTED_NAMES = 20  # names that one line of a terminal still shows
LEAST_START, MOST_NEAR = 3, 3
"""Least length of a part that suggests names, and most names suggested."""
T = TypeVar("T")


def did_you_mean(name: str, known: Collection[str]) -> str:
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    if not near and len(name) >= LEAST_START:
        parts = {part for each in folded for part in each.split("-")}
        part = difflib.get_close_matches(name.casefold(), sorted(parts), n=1, cutoff=0.8)
        near = [each for each in folded if name.casefold() in each or (part and part[0] in each.split("-"))]
        near = near[:MOST_NEAR]
    return f"; did you mean {' or '.join(repr(folded[each]) for each in near)}?" if near else ""


def unknown_name(kind: str, name: str, known: Collection[str], *, listed_by: str | None = None) -> str:
    """kind: of the name, such as "shape". listed_by: the command that prints all names, for long lists."""
    hint = did_you_mean(name, known)
    if listed_by is not None and len(known) > LISTED_NAMES:
        return f"unknown {kind} {name!r}: expected one of {len(known)} names{hint}; see {listed_by}"
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"


class Registry(Generic[T]):
    def __init__(self, kind: str, entries: Mapping[str, str | tuple[str, str]]) -> None:
        self.kind = kind
        rows = {name: (row, "") if isinstance(row, str) else row for name, row in entries.items()}
        self._entries = {name: entry for name, (entry, _) in rows.items()}
        self._about = {name: about for name, (_, about) in rows.items()}

    def load(self, name: str) -> T:
        self.require(name)
        module, attribute = self._entries[name].split(":")
        return cast(T, getattr(importlib.import_module(module), attribute))

    def require(self, name: str) -> None:
        """Raise UsageError unless `name` is known; import nothing."""
        if name in self._entries:
            return
        raise UsageError(unknown_name(self.kind, name, self._entries))

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def about(self, name: str) -> str:
        return self._about[name]

    def targets(self) -> Iterator[tuple[str, str]]:
        """(name, "module:attribute") rows, for the architecture test."""
        return iter(self._entries.items())
