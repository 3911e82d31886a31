"""Imports: makes this process import kvcheck anew, with some of its modules from a changed text.

Invariants:
- After `start_anew` nothing of kvcheck is loaded but its kernels and, where it is unchanged, core.base: both lie below
  what is edited and keep nothing of it.
- A changed text is never written to disk, and no bytecode is kept of it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from kvcheck.core.stress.mutation.edits import module_of

BASE = "kvcheck.core.base"
KEPT = ("kvcheck.kernels",)


def start_anew(folder: Path, texts: Mapping[str, str]) -> None:
    """Forget what is loaded of kvcheck; import it from now on with these texts. texts: by file below `folder`."""
    changed = {module_of(file): (folder / file, text) for file, text in texts.items()}
    kept = KEPT if any(name.startswith(f"{BASE}.") for name in changed) else (*KEPT, BASE)
    for name in [*sys.modules]:
        if name.startswith("kvcheck.") and not any(name == each or name.startswith(f"{each}.") for each in kept):
            del sys.modules[name]
    if changed:
        sys.meta_path.insert(0, _Finder(changed))


class _Finder:
    """Finds the changed modules; all others are found as ever."""

    def __init__(self, changed: Mapping[str, tuple[Path, str]]) -> None:
        self._changed = changed

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a changed module."""
        if name not in self._changed:
            return None
        file, text = self._changed[name]
        search = [str(file.parent)] if file.name == "__init__.py" else None
        loader = _Loader(name, str(file), text)
        return spec_from_file_location(name, file, loader=loader, submodule_search_locations=search)


class _Loader(SourceFileLoader):
    """Loads a file's module from another text, without the bytecode that is kept for the file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode()

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("a changed text has no file and no bytecode")
