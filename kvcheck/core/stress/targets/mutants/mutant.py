"""Mutant: a bug as a value, with its card and the oracle that must kill it.

Invariants:
- A mutant differs from FIXED in one part, or in two if two faults do harm only together.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, replace

from kvcheck.core.stress.targets.target import FIXED, TargetParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """bug: row of the bug table (a to e). within: fewest "no" answers and late messages before it shows; 0 if the eager
    order can show it. shows, matters, example: the card of `kvcheck explain`, with `breaks`."""

    name: str
    bug: str
    parts: TargetParts
    scenario: str
    shape: str
    killed_by: str
    code: str
    shows: str
    matters: str
    example: str
    decoder: str = "words"
    strategy: str = "portfolio"
    within: int = 0

    @property
    def breaks(self) -> tuple[str, ...]:
        pairs = [(getattr(FIXED, row.name), getattr(self.parts, row.name)) for row in fields(TargetParts)]
        return tuple(place for fixed, part in pairs for place in overridden(fixed, part))

    @property
    def bound(self) -> str | None:
        return f"{self.strategy} within {self.within}" if self.within else None

    @property
    def faults(self) -> tuple[TargetParts, ...]:
        names = [
            row.name for row in fields(TargetParts) if getattr(self.parts, row.name) is not getattr(FIXED, row.name)
        ]
        return tuple(replace(FIXED, **{name: getattr(self.parts, name)}) for name in names)


def overridden(fixed: type, part: type) -> list[str]:
    """Functions that a subclass overrides, at their place in the fixed code."""
    own = part.__mro__[: part.__mro__.index(fixed)]
    places = []
    for name in dict.fromkeys(name for each in own for name in vars(each)):
        owner = next((each for each in fixed.__mro__ if name in vars(each)), None)
        if owner is not None and (inspect.isroutine(vars(owner)[name]) or isinstance(vars(owner)[name], property)):
            places.append(f"{owner.__module__.replace('.', '/')}.py: {owner.__qualname__}.{name}")
    return places
