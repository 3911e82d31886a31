"""Oracle: a judge of histories.

Invariants:
- An oracle keeps its own state, reads events only, and never stops a run.
- `judged` counts what it looked at; an oracle that looked at nothing has not passed anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler, History

MAX_FINDINGS = 20
"""Findings an oracle reports for one schedule; more of the same helps nobody."""


class Oracle(Protocol):
    """One check."""

    name: str
    judged: int
    findings: list[Finding]

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        """The kinds of event it wants."""

    def finish(self) -> None:
        """The history has ended: judge what only the end can show."""


def judge(oracle: Oracle, history: History) -> tuple[Finding, ...]:
    """Findings over a stored history."""
    table: dict[type, list[Handler]] = {}
    for kind, handler in oracle.handlers():
        table.setdefault(kind, []).append(handler)
    for event in history.events:
        for handler in table.get(type(event), ()):
            handler(event)
    oracle.finish()
    return tuple(oracle.findings)
