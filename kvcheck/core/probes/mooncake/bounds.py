"""Bounds: the longest duration of a call by the library's own settings.

A call is late only some time after the bound that the library states: a busy machine is no finding.
"""

from __future__ import annotations

from collections.abc import Mapping

STATED = "MC_TRANSFER_TIMEOUT"
SOON = {STATED: "10", "MC_TCP_PROGRESS_TIMEOUT_SEC": "3", "MC_TCP_STATUS_TIMEOUT_SEC": "3"}
"""Settings of probes in which calls fail: shorter limits than the library's own, for the same outcome."""
LEAST_S = 5
"""The library replaces a shorter limit by this one."""
USUAL_S = 30
PATIENCE_S = 20.0


def longest_call_s(variables: Mapping[str, str]) -> float:
    stated = variables.get(STATED, "")
    return max(LEAST_S, int(stated) if stated.isdecimal() else USUAL_S) + PATIENCE_S
