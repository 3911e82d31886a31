"""Trouble: one reason why a run or a gate is no pass, or would be none under an assumption.

Invariants:
- One trouble for each card, and for each further place of it. Its symptoms are counted in `seen`.
- `fingerprint` is equal in the next run: pages, rows, layers, requests and messages are not in it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from enum import Enum

from kvcheck.core.base.causes import place_of
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.record import RunRecord
from kvcheck.core.report.cards import Card, seen_text
from kvcheck.core.report.wording import called_text, replay_line


class TroubleKind(Enum):
    FINDING = "finding"
    """It fails the run."""
    SLOWER = "slower"
    """It fails the gate, by a price."""
    GAP = "gap"
    """It leaves the run without a verdict, which is no pass."""
    CONDITIONAL = "conditional"
    """It changes nothing: it holds under an assumption that the engine does not promise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CiTrouble:
    """cells: those that show it, the cause's own first; empty for the whole run. place: the part of its location that
    is equal in each run. named: the fields of a baseline row for it. called: the functions of an
    installed engine."""

    kind: TroubleKind
    code: str | None = None
    title: str
    cells: tuple[str, ...] = ()
    place: str = ""
    message: str
    seen: str = ""
    condition: str | None = None
    named: str = ""
    called: str = ""
    replay: str

    @property
    def head(self) -> str:
        words = ("conditional" if self.kind is TroubleKind.CONDITIONAL else None, self.code, self.title)
        return " ".join(word for word in words if word)

    @property
    def where(self) -> str:
        return self.cells[0] if self.cells else "the run"

    @property
    def notes(self) -> tuple[str, ...]:
        told = (
            ("only if", self.condition),
            ("called", self.called),
            ("seen", self.seen),
            ("in a baseline:", self.named),
        )
        return tuple(f"{label} {text}" for label, text in told if text)

    @property
    def lines(self) -> tuple[str, ...]:
        return (
            self.message,
            *self.notes,
            *([f"next: {self.replay}"] if self.replay else ()),
            *([f"more: kvcheck explain {self.code}"] if self.code in CODES else ()),
        )

    def fingerprint(self, cell: str) -> str:
        named = json.dumps([cell, self.code or self.title, self.place])
        return hashlib.sha256(named.encode("ascii")).hexdigest()


def title_of(code: str | None, otherwise: str) -> str:
    known = CODES.get(code or "")
    return known.title if known else otherwise


def of_card(record: RunRecord, card: Card, *, fails_on_conditional: bool = False) -> CiTrouble:
    cause, bug = card.finding, card.bug
    is_conditional = cause.condition is not None and not fails_on_conditional
    return CiTrouble(
        kind=TroubleKind.CONDITIONAL if is_conditional else TroubleKind.FINDING,
        code=cause.code,
        title=card.title,
        cells=tuple(dict.fromkeys((cause.cell, *bug.cells))),
        place=place_of(cause),
        message=cause.message,
        seen=seen_text(card),
        condition=cause.condition,
        called=called_text(cause),
        replay=replay_line(record, cause),
    )
