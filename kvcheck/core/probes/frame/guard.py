"""Guard: the one place that catches an engine's exceptions and separates them from wrong calls of kvcheck's own.

Invariants:
- An exception is the engine's only if, of the frames of kvcheck and the engine, the innermost is the engine's. An
  exception about a missing name or module never is: an object that kvcheck made may lack an attribute of the real one.
- Refused counts against the engine's frame that called the stand-in.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

from kvcheck.core.base.errors import machine_trouble
from kvcheck.core.probes.frame.calls import Call, raised

T = TypeVar("T")

OURS = "kvcheck"
_OF_THE_HARNESS = (AttributeError, NameError, ImportError)


class CannotDrive(Exception):
    """The release cannot be driven this way; the text names the missing part. Neither a finding nor a pass."""


class StandInRefusal(RuntimeError):
    """A stand-in refuses a call that the real thing would refuse."""


@dataclass(frozen=True, slots=True)
class Fault:
    """where: module and line in the engine or kvcheck. raised_in: module of the innermost frame. call: the engine's
    functions that it passed."""

    text: str
    where: str = ""
    is_engine: bool = False
    raised_in: str = ""
    call: Call = ()


def attempt(call: Callable[[], T], package: str = "") -> T | Fault:
    """Return the call's result or its Fault. package: of the engine, if its own exceptions count against it. Raises
    CannotDrive for NotImplementedError and trouble of the machine."""
    try:
        return call()
    except CannotDrive:
        raise
    except NotImplementedError as error:  # the release itself refuses
        where = _innermost(error.__traceback__, package)
        raise CannotDrive(f"this release does not implement it ({where})") from error
    except Exception as error:  # an engine may raise anything
        if trouble := machine_trouble(error):
            raise CannotDrive(trouble) from error
        is_refused = isinstance(error, StandInRefusal)
        where = _innermost(error.__traceback__, package, is_ours_too=not is_refused)
        is_engine = bool(package) and where.partition(".")[0] == package and not isinstance(error, _OF_THE_HARNESS)
        trace = error.__traceback__
        return Fault(_first_line(error), where, is_engine, _raised_in(trace), raised(trace, package))


def _first_line(error: Exception) -> str:
    lines = (line.strip() for line in str(error).splitlines())
    return ": ".join(part for part in (type(error).__name__, next(filter(None, lines), "")) if part)[:300]


def _raised_in(trace: TracebackType | None) -> str:
    """Module of the innermost frame; "" for the import machinery or kvcheck."""
    name = ""
    while trace is not None:
        name, trace = str(trace.tb_frame.f_globals.get("__name__", "")), trace.tb_next
    return "" if name.partition(".")[0] in (OURS, "importlib") else name


def _innermost(trace: TracebackType | None, package: str, *, is_ours_too: bool = True) -> str:
    where = ""
    names = (OURS, package) if is_ours_too else (package,)
    while trace is not None:
        name = str(trace.tb_frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] in names:
            where = f"{name}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return where


def fitted(callee: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Pass the offered values that the signature names. Raises CannotDrive for a required parameter without one."""
    parameters = inspect.signature(callee).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in offered]
    if missing:
        raise CannotDrive(f"{getattr(callee, '__name__', callee)} asks for {', '.join(missing)}, which no probe knows")
    known = {each.name for each in named}
    return callee(**{name: value for name, value in offered.items() if name in known})
