"""Calls: an engine's constructor or method called with what it asks for, by the names of its parameters.

Invariants:
- A parameter that is required and that nobody has a value for is CannotDrive with its name, never a guess.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive


def fitted(callee: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call it with those of the offered values that it names; what it would only pass on is left to its defaults."""
    parameters = inspect.signature(callee).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in offered]
    if missing:
        raise CannotDrive(f"{getattr(callee, '__name__', callee)} asks for {', '.join(missing)}, which no probe knows")
    known = {each.name for each in named}
    return callee(**{name: value for name, value in offered.items() if name in known})
