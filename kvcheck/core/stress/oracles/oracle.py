"""Oracle: judges one contract over a history of events.

Invariants:
- An oracle reads events only, and never stops a run.
- `judged` counts its judgements. An oracle with none has passed nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler, History

MAX_FINDINGS = 20
"""An oracle reports at most so many findings for one schedule."""


UNITS = {"state": "slot", "metadata": "slot", "seals": "slot", "rows": "row", "table": "row", "offload": "value"}
"""The noun for ids of a space; ids of other spaces are pages."""


def unit_word(space: str) -> str:
    kind = space.rpartition(":")[2].removeprefix("host.")
    return next((word for name, word in UNITS.items() if kind.startswith(name)), "page")


def unit_text(space: str, unit: int) -> str:
    word = unit_word(space)
    return f"{space.removesuffix('rows')}{word} {unit}" if word == "row" else f"{space} {word} {unit}"


class Oracle:
    name: ClassVar[str]

    def __init__(self) -> None:
        self.judged = 0
        self.findings: list[Finding] = []

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        raise NotImplementedError

    def finish(self) -> None:
        """Judge at the end of the history."""

    @property
    def note(self) -> str | None:
        """A warning of a schedule that breaks no rule, or None."""
        return None

    def add(
        self,
        code: str,
        message: str,
        *,
        tier: str | None = None,
        buffer: str | None = None,
        page: int | None = None,
        row: int | None = None,
        request: int | None = None,
    ) -> None:
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(
                Finding(
                    code=code,
                    oracle=self.name,
                    message=message,
                    tier=tier,
                    buffer=buffer,
                    page=page,
                    row=row,
                    request=request,
                )
            )


def tier_of(space: str) -> str:
    kind = space.rpartition(":")[2]
    return next((tier for tier in ("host", "storage") if kind == tier or kind.startswith(f"{tier}.")), "device")


def judge(oracle: Oracle, history: History) -> tuple[Finding, ...]:
    table: dict[type, list[Handler]] = {}
    for kind, handler in oracle.handlers():
        table.setdefault(kind, []).append(handler)
    for event in history.events:
        for handler in table.get(type(event), ()):
            handler(event)
    oracle.finish()
    return tuple(oracle.findings)
