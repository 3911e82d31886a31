"""The five bugs in serving engines that scenarios were made for. A published letter keeps its meaning."""

from __future__ import annotations

from typing import Final

BUGS: Final = {
    "retract-resume": "a: what a retracted request gets back, and what is kept of a metadata slot",
    "hicache": "b: reads of a layer before the host tier has loaded it",
    "pd-transfer": "c: state lists of different lengths at the two ends of a transfer",
    "hicache-hybrid": "d: index lists that a prefix tree keeps, moved in place",
    "nvlink-aux": "e: done is published before the bytes have landed, and ranks disagree",
}
"""Scenario -> letter and subject of its bug."""


def bug_of(scenario: str) -> str:
    return BUGS.get(scenario, scenario)
