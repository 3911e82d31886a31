"""Calls: chains of an engine's own functions that were under way, for findings.

Invariants:
- Frames of other packages, and of generated code, are left out. Files are named from the engine's package on. So equal
  runs give equal texts, in any environment.
"""

from __future__ import annotations

import sys
from types import CodeType, FrameType, TracebackType

Call = tuple[tuple[CodeType, int], ...]
"""Functions with their lines at that moment, outermost first."""
ENDS = 2
"""Names of a long chain that are kept at either end."""


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
