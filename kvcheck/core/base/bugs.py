"""The five bugs that scenarios were made for, as they occurred in serving engines.

Invariants:
- A scenario has one bug or none; a letter, once published, keeps its meaning.
"""

from __future__ import annotations

from typing import Final

BUGS: Final = {
    "retract-resume": "a: what a retracted request gets back, and what is kept of a metadata slot",
    "hicache": "b: reads of a layer before the host tier has loaded it",
    "pd-transfer": "c: state lists of different lengths at the two ends of a transfer",
    "hicache-hybrid": "d: index lists that a prefix tree keeps, moved in place",
    "nvlink-aux": "e: done is published before the bytes have landed, and ranks disagree",
}
"""Scenario -> the letter of its bug, and what it is about."""


def bug_of(scenario: str) -> str:
    """The bug that a scenario is about; the scenario's name where it is about none."""
    return BUGS.get(scenario, scenario)
