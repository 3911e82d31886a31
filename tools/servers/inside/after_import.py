"""After import: calls a function with a module of the engine as soon as that module is loaded.

Invariants:
- Modules are found and loaded by the finders that are there anyway. A module that is never loaded is never asked for.
- A function that raises makes the import fail.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

Change = Callable[[ModuleType], None]


class AfterImport(importlib.abc.MetaPathFinder):
    """The finder. changes: module -> what is called with it once it is loaded, in this order."""

    def __init__(self, changes: Mapping[str, Sequence[Change]]) -> None:
        self._changes = changes

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """What the other finders say, with a loader that makes the changes."""
        if fullname not in self._changes:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                assert spec.loader is not None, f"{fullname} has no loader"
                spec.loader = _Loader(spec.loader, self._changes[fullname])
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A loader that steps aside once its module is loaded."""

    def __init__(self, loader: importlib.abc.Loader, changes: Sequence[Change]) -> None:
        self._loader = loader
        self._changes = changes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        for change in self._changes:
            change(module)
