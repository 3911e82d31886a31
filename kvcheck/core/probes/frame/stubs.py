"""Stubs: stand-ins for compiled packages that an engine imports and a machine without a device lacks.

Invariants:
- A stub is served only if every other finder has failed, the package is on the allow-list, and the importing module is
  the engine's, or of one of ASKERS. Once a package was served, every module gets the rest of it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive

ASKERS = {"torchvision": "transformers"}
"""Package -> a library that refuses an import of the engine if the package is missing (SGLang 0.5.21)."""


ABSENT = object()


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The finder of stand-ins. package: of the engine. allowed: packages that stand-ins may replace."""

    def __init__(self, package: str, allowed: Sequence[str]) -> None:
        self._package = package
        self._allowed = frozenset(allowed)
        self.served: dict[str, None] = {}
        self.calls: dict[str, int] = {}
        self._windows: list[dict[str, int]] = []

    def install(self) -> None:
        sys.meta_path.append(self)

    def uninstall(self) -> None:
        sys.meta_path.remove(self)
        for name in self.served:
            sys.modules.pop(name, None)

    @contextmanager
    def window(self) -> Iterator[dict[str, int]]:
        called: dict[str, int] = {}
        self._windows.append(called)
        try:
            yield called
        finally:
            self._windows.remove(called)

    @contextmanager
    def refused(self, what: str) -> Iterator[None]:
        """Raise CannotDrive after the block if it called a stand-in. what: the call in it."""
        with self.window() as called:
            yield
        if called:
            raise CannotDrive(f"{what} called stand-ins, which move no bytes: {', '.join(sorted(called))}")

    def called(self, name: str) -> None:
        for counts in (self.calls, *self._windows):
            counts[name] = counts.get(name, 0) + 1

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        package = fullname.partition(".")[0]
        if package not in self._allowed:
            return None
        if package not in self.served and self._asker() not in (self._package, ASKERS.get(package)):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        self.served[spec.name] = None
        return StubModule(spec.name, self)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: a stand-in has no code."""

    def _asker(self) -> str | None:
        frame: FrameType | None = sys._getframe(2)
        while frame is not None:
            name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
            if name not in ("importlib", "_frozen_importlib"):
                return name
            frame = frame.f_back
        return None


class StubModule(ModuleType):
    def __init__(self, name: str, stubs: Stubs) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__version__ = "0"  # other libraries compare versions of packages, and "0" is older than any
        self._stubs = stubs

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(f"stand-in module {self.__name__} has no {name}")
        return Stub(f"{self.__name__}.{name}", self._stubs)


class Stub:
    """Any attribute of a stand-in module. It can be subclassed, used as a decorator and called; calls are counted."""

    def __init__(self, name: str, stubs: Stubs) -> None:
        self._name = name
        self._stubs = stubs

    def __getattr__(self, name: str) -> Stub:
        if name.startswith("__"):
            raise AttributeError(f"stand-in {self._name} has no {name}")
        return Stub(f"{self._name}.{name}", self._stubs)

    def __call__(self, *arguments: object, **named: object) -> Stub:
        self._stubs.called(self._name)
        return Stub(f"{self._name}()", self._stubs)

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (object,)

    def __repr__(self) -> str:
        return f"<stand-in for {self._name}>"


@contextmanager
def replaced(holder: Any, names: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(holder).get(name, ABSENT) for name in names}
    for name, value in names.items():
        setattr(holder, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is ABSENT:
                delattr(holder, name)
            else:
                setattr(holder, name, value)
