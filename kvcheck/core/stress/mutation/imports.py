"""Imports: makes this process import kvcheck anew, with some of its modules from a changed text.

Invariants:
- After `start_anew` nothing of kvcheck is loaded but its kernels and, where it is unchanged, core.base: both lie below
  what is edited and keep nothing of it.
- A changed text is never written to disk, and no bytecode is kept of it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from kvcheck.core.stress.mutation.edits import module_of

Rewrite = Callable[[ast.Module, str], ast.Module]

BASE = "kvcheck.core.base"
KEPT = ("kvcheck.kernels",)


def start_anew(folder: Path, texts: Mapping[str, str], rewrite: Rewrite | None = None) -> None:
    """Forget what is loaded of kvcheck; import it from now on with these texts.

    texts: by file below `folder`. rewrite: what a module's syntax tree becomes before it is compiled.
    """
    changed = {module_of(file): _Changed(file, folder / file, text, rewrite) for file, text in texts.items()}
    kept = KEPT if any(name.startswith(f"{BASE}.") for name in changed) else (*KEPT, BASE)
    for name in [*sys.modules]:
        if name.startswith("kvcheck.") and not any(name == each or name.startswith(f"{each}.") for each in kept):
            del sys.modules[name]
    if changed:
        sys.meta_path.insert(0, _Finder(changed))


class _Changed(NamedTuple):
    """A module with another text."""

    file: str
    path: Path
    text: str
    rewrite: Rewrite | None


class _Finder:
    """Finds the changed modules; all others are found as ever."""

    def __init__(self, changed: Mapping[str, _Changed]) -> None:
        self._changed = changed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a changed module."""
        if name not in self._changed:
            return None
        found = self._changed[name]
        search = [str(found.path.parent)] if found.path.name == "__init__.py" else None
        loader = _Loader(name, found)
        return spec_from_file_location(name, found.path, loader=loader, submodule_search_locations=search)


class _Loader(SourceFileLoader):
    """Loads a file's module from another text, without the bytecode that is kept for the file."""

    def __init__(self, name: str, changed: _Changed) -> None:
        super().__init__(name, str(changed.path))
        self._changed = changed

    def get_data(self, path: str) -> bytes:
        return self._changed.text.encode()

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("a changed text has no file and no bytecode")

    def source_to_code(self, data: Any, path: Any, *, _optimization: int = -1) -> CodeType:  # type: ignore[override]
        rewrite = self._changed.rewrite
        source = data if rewrite is None else rewrite(ast.parse(data), self._changed.file)
        made: CodeType = compile(source, path, "exec", dont_inherit=True, optimize=_optimization)
        return made
