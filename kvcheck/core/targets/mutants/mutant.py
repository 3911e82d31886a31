"""Mutant: a bug as a value, with its card and the oracle that must kill it.

Invariants:
- A mutant differs from FIXED in exactly one part.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcheck.core.targets.parts import TargetParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A bug, and who must find it.

    name: for --mutant. bug: row of the bug table (a to e). shape: preset that shows it. code: the finding it gives.

    shows, matters, example: the card that `kvcheck explain` prints.
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
