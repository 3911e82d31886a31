"""Calls: an engine's constructor or method is called with the values that its parameters name.

Invariants:
- A required parameter without a value is CannotDrive with its name. No value is guessed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive


def fitted(callee: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call it with those offered values that its signature names. `*args` and `**kwargs` get nothing."""
    parameters = inspect.signature(callee).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in offered]
    if missing:
        raise CannotDrive(f"{getattr(callee, '__name__', callee)} asks for {', '.join(missing)}, which no probe knows")
    known = {each.name for each in named}
    return callee(**{name: value for name, value in offered.items() if name in known})
