"""Guard: the one place that catches an engine's exceptions and separates them from wrong calls of kvcheck's own.

Invariants:
- An exception is the engine's only if, of the frames of kvcheck and the engine, the innermost is the engine's. An
  exception about a missing name or module never is: an object that kvcheck made may lack an attribute of the real one.
- Refused counts against the engine's frame that called the stand-in.
- Frames of other packages, and of generated code, are left out. Files are named from the engine's package on. So equal
  runs give equal texts, in any environment.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

from kvcheck.core.base.errors import machine_trouble

T = TypeVar("T")

OURS = "kvcheck"
_OF_THE_HARNESS = (AttributeError, NameError, ImportError)
Call = tuple[tuple[CodeType, int], ...]
"""Functions with their lines at that moment, outermost first."""
ENDS = 2
"""Names of a long chain that are kept at either end."""


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


def under_way(package: str) -> Call:
    """Return the package's functions on the stack of this thread."""
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_of(frame, package):
            found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(reversed(found))


def raised(trace: TracebackType | None, package: str) -> Call:
    found = []
    while trace is not None:
        if is_of(trace.tb_frame, package):
            found.append((trace.tb_frame.f_code, trace.tb_lineno))
        trace = trace.tb_next
    return tuple(found)


def is_of(frame: FrameType, package: str) -> bool:
    code = frame.f_code
    is_written = code.co_filename[:1] != "<" and code.co_name[:1] != "<"
    return is_written and str(frame.f_globals.get("__name__", "")).partition(".")[0] == package


def call_text(call: Call, package: str) -> str:
    """Return "Controller.write > start_writing   PACKAGE/FILE:LINE", the line that of the last function. A class is
    named once, and of a long chain the first and the last two functions."""
    names, before = [], ""
    for code, _ in call:
        name = getattr(code, "co_qualname", code.co_name).replace("<locals>.", "")
        names.append(name.removeprefix(f"{before}.").removeprefix(f"{before.partition('.')[0]}."))
        before = name
    if len(names) > 2 * ENDS:
        names[ENDS:-ENDS] = ["…"]
    code, line = call[-1]
    return f"{' > '.join(names)}   {code.co_filename[code.co_filename.rfind(f'/{package}/') + 1 :]}:{line}"
