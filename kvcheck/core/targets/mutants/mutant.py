"""Mutant: a bug as a value, with its card and the oracle that must kill it.

Invariants:
- A mutant differs from FIXED in exactly one part.
- What it breaks is read off the part that it replaces, and written nowhere.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields

from kvcheck.core.targets.parts import FIXED, TargetParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug, and the oracle that must find it.

    name: for --mutant. bug: row of the bug table (a to e). shape: preset that shows it. code: the finding it gives.
    decoder: the one that shows it.

    shows, matters, example: the card that `kvcheck explain` prints, with `breaks`.
    """

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

    @property
    def breaks(self) -> tuple[str, ...]:
        """The fixed functions that it overrides, each as "kvcheck/core/cache/offload.py: Offload.save"."""
        pairs = [(getattr(FIXED, row.name), getattr(self.parts, row.name)) for row in fields(TargetParts)]
        return tuple(place for fixed, part in pairs for place in overridden(fixed, part))


def overridden(fixed: type, part: type) -> list[str]:
    """What a subclass of a fixed class overrides, each where the fixed code defines it; nothing for that class itself.

    Names that the fixed class lacks are the subclass's own, and no function of the fixed code.
    """
    own = part.__mro__[: part.__mro__.index(fixed)]
    places = []
    for name in dict.fromkeys(name for each in own for name in vars(each)):
        owner = next((each for each in fixed.__mro__ if name in vars(each)), None)
        if owner is not None and (inspect.isroutine(vars(owner)[name]) or isinstance(vars(owner)[name], property)):
            places.append(f"{owner.__module__.replace('.', '/')}.py: {owner.__qualname__}.{name}")
    return places
