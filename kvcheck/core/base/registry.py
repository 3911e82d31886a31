"""Registry: a literal table of names and objects that are imported when they are loaded.

Invariants:
- An entry is "module:attribute", or that with a sentence for `kvcheck list`.
- An unknown name is a UsageError that lists the known ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar, cast

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.misspelt import unknown_name

T = TypeVar("T")


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
