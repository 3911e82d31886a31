"""Calls an engine's constructor or method with the values that its parameters name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from kvcheck.core.probes.frame.guard import CannotDrive


def fitted(callee: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
    """Call it with the offered values that its signature names. Raises CannotDrive with the name of a required
    parameter without one."""
    parameters = inspect.signature(callee).parameters.values()
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    missing = [each.name for each in named if each.default is each.empty and each.name not in offered]
    if missing:
        raise CannotDrive(f"{getattr(callee, '__name__', callee)} asks for {', '.join(missing)}, which no probe knows")
    known = {each.name for each in named}
    return callee(**{name: value for name, value in offered.items() if name in known})
