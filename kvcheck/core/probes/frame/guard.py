"""Guard: the one place where an exception of an engine is caught, and told apart from a wrong call of our own.

Invariants:
- An exception is the engine's only where the innermost frame that is ours or the engine's is the engine's, and where it
  does not speak of a name or module that is not there: a bare object of our making may lack what a real one has.
- What a stand-in refuses as the real thing would is the doing of whoever of the engine asked for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from kvcheck.core.base.errors import machine_trouble

T = TypeVar("T")

OURS = "kvcheck"
_OF_THE_HARNESS = (AttributeError, NameError, ImportError)
"""Kinds that a thing of ours can cause inside the engine."""


class CannotDrive(Exception):
    """The release at hand cannot be driven this way; says what is missing. Never a finding, never a pass."""


class Refused(RuntimeError):
    """What a stand-in raises where the real thing would raise."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What a call raised. is_engine: in code of the engine, about its own business. where: module and line."""

    text: str
    where: str = ""
    is_engine: bool = False


def attempt(call: Callable[[], T], package: str = "") -> T | Fault:
    """The result of a call, or what it raised. package: the engine, where its own exceptions matter."""
    try:
        return call()
    except CannotDrive:
        raise
    except NotImplementedError as error:  # the release says itself that it cannot
        where = _innermost(error.__traceback__, package)
        raise CannotDrive(f"this release does not implement it ({where})") from error
    except Exception as error:  # an engine may raise anything
        if trouble := machine_trouble(error):
            raise CannotDrive(trouble) from error
        is_refused = isinstance(error, Refused)
        where = _innermost(error.__traceback__, package, is_ours_too=not is_refused)
        is_engine = bool(package) and where.partition(".")[0] == package and not isinstance(error, _OF_THE_HARNESS)
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0][:300]
        return Fault(text, where, is_engine)


def _innermost(trace: TracebackType | None, package: str, *, is_ours_too: bool = True) -> str:
    """Module and line of the innermost frame that is the engine's, or ours too."""
    where = ""
    names = (OURS, package) if is_ours_too else (package,)
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in names:
            where = f"{name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return where
