"""Imports: makes this process import kvcheck anew, with some of its modules from an edited text.

Invariants:
- After `start_anew` nothing of kvcheck is loaded but its kernels and, where it is unchanged, core.base: both lie below
  the edited code and keep nothing of it.
- An edited text is never written to disk, and no bytecode of it is kept.
- It is found before anybody else's hook rewrites the file, as pytest's does.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from tools.mutation.edits import module_of

BASE = "kvcheck.core.base"
KEPT = ("kvcheck.kernels",)


def start_anew(package: Path, texts: Mapping[str, str], *others: str) -> None:
    """Forget kvcheck, and others that use it; import kvcheck from now on with these texts. texts: by file below its
    folder."""
    edited = {module_of(file): (package / file, text) for file, text in texts.items()}
    kept = KEPT if any(name.startswith(f"{BASE}.") for name in edited) else (*KEPT, BASE)
    for name in [*sys.modules]:
        if name.startswith("kvcheck.") and not any(name == each or name.startswith(f"{each}.") for each in kept):
            del sys.modules[name]
    for name in others:
        sys.modules.pop(name, None)
    if edited:
        sys.meta_path.insert(0, _Finder(edited))


class _Finder:
    def __init__(self, edited: Mapping[str, tuple[Path, str]]) -> None:
        self._edited = edited

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._edited:
            return None
        file, text = self._edited[name]
        search = [str(file.parent)] if file.name == "__init__.py" else None
        return spec_from_file_location(name, file, loader=_Loader(name, file, text), submodule_search_locations=search)


class _Loader(SourceFileLoader):
    """Loads a file's module from another text, without the bytecode that is kept for the file."""

    def __init__(self, name: str, file: Path, text: str) -> None:
        super().__init__(name, str(file))
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode()

    def path_stats(self, path: str) -> Mapping[str, float]:
        raise OSError("an edited text has no file and no bytecode")
