"""Targets of the user's own: `--target MODULE:NAME` names parts of an engine, or a whole target.

    parts     TargetParts: kvcheck's own engine with some classes replaced
    target    build(setup) -> Engine, and its capabilities
    factory   a function without arguments that returns one of the two

Invariants:
- The current folder is the last place of the module search, so that a file there hides no installed module.
- An error of the user's module is a UsageError with its name and text, never a finding; one of the machine is UNKNOWN.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Set as AbstractSet
from pathlib import Path
from traceback import walk_tb
from typing import cast

from kvcheck.core.base.deadline import Interrupted
from kvcheck.core.base.errors import UnknownVerdict, UsageError, machine_trouble, text_of
from kvcheck.core.base.identity import commit_of, file_digest, folder_digest
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import Engine, Setup, Target, TargetParts

PLACE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

ENGINE_HAS = ("submit", "abort", "standings", "make_happen", "step", "counts", "evictions", "close")
"""The methods of an engine. `is_idle` is a property, which may not be read before the engine runs."""


class NoEngine(UsageError):
    """A target's `build` returned an object that lacks a member of Engine."""


class OwnTarget:
    def __init__(self, name: str, target: Target) -> None:
        self.name = name
        self.capabilities = target.capabilities
        self._target = target

    def build(self, setup: Setup) -> Engine:
        """Return a fresh engine. Raises NoEngine if a member of Engine is missing."""
        engine = self._target.build(setup)
        if missing := [name for name in ENGINE_HAS if not callable(getattr(engine, name, None))]:
            raise NoEngine(
                f"--target {self.name}: expected build to return an engine with {', '.join(ENGINE_HAS)}; got "
                f"{_kind(engine)} without {', '.join(missing)}"
            )
        return engine


def is_own(name: str) -> bool:
    return PLACE.fullmatch(name) is not None


def load_own(name: str) -> OwnTarget:
    """Import the target of MODULE:NAME. Raises UsageError with the expected and the found type."""
    found = _found(name)
    if callable(found) and not isinstance(found, type) and not _is_target(found):
        found = _called(name, found)
    if isinstance(found, TargetParts):
        return OwnTarget(name, BuiltinTarget(found))
    if not _is_target(found) or isinstance(found, type):
        raise UsageError(
            f"--target {name}: expected TargetParts, a target with build and capabilities, or a function without "
            f"arguments that gives one; got {_kind(found)}; a pool of tensors is checked by kvcheck.testing instead: "
            "docs/own-code.md"
        )
    target = cast(Target, found)
    unknown = sorted(map(repr, set(target.capabilities) - BuiltinTarget.capabilities))
    if unknown:
        known = ", ".join(sorted(BuiltinTarget.capabilities))
        raise UsageError(f"--target {name}: unknown capability {', '.join(unknown)}; known: {known}")
    return OwnTarget(name, target)


def own_identity(name: str) -> str:
    """One line for the code of MODULE:NAME: digest of its package's folder or its file, and the commit."""
    load_own(name)
    top = name.partition(":")[0].partition(".")[0]
    file = getattr(sys.modules[top], "__file__", None)
    if file is None:
        raise UsageError(
            f"--target {name}: {top} lies in no file, so a record could not say what was judged; expected a module, or "
            "a package with an __init__.py"
        )
    path = Path(file)
    is_package = path.name == "__init__.py"
    digest = folder_digest(path.parent) if is_package else file_digest(path)
    commit = commit_of(path.parent)
    return ", ".join(part for part in (name, commit and f"commit {commit}", digest) if part)


def _found(name: str) -> object:
    if not is_own(name):
        raise UsageError(f"--target {name}: expected MODULE:NAME, such as my_package.my_module:make_target")
    module, _, attribute = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        loaded = importlib.import_module(module)
    except Interrupted:
        raise
    except BaseException as error:  # any error of the user's module
        _check_machine(name, error)
        raise UsageError(
            f"--target {name}: cannot import {module} {_told(error)}; expected a module that is installed or lies in "
            "the current folder"
        ) from error
    if not hasattr(loaded, attribute):
        raise UsageError(f"--target {name}: {module} has no {attribute}")
    return getattr(loaded, attribute)


def _called(name: str, factory: object) -> object:
    try:
        return factory()  # type: ignore[operator]
    except Interrupted:
        raise
    except BaseException as error:  # any error of the user's function
        _check_machine(name, error)
        raise UsageError(f"--target {name}: calling it without arguments failed {_told(error)}") from error


def _check_machine(name: str, error: BaseException) -> None:
    if (trouble := machine_trouble(error, is_of_user=True)) is not None:
        raise UnknownVerdict(f"--target {name}: {trouble}") from error


def _is_target(value: object) -> bool:
    can = getattr(value, "capabilities", None)
    return callable(getattr(value, "build", None)) and isinstance(can, AbstractSet)


def _told(error: BaseException) -> str:
    first = next(iter(text_of(error).splitlines()), "")
    places = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    inner = [each for each in places if each[0] != __file__ and not each[0].startswith("<")][-1:]
    at = "".join(f" at {Path(file).name}:{line}" for file, line in inner)
    return f"({type(error).__name__}{': ' * bool(first)}{first}){at}"


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
