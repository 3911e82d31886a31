"""Cards: the findings of a run, merged into likely causes with the clearest first, as terminal, page and CI list them.

Invariants:
- Findings of one code and oracle are one card over all cells. Other findings of these cells alone are beside it.
- A condition is no symptom of a failure, nor a failure of a condition.
- Texts are the record's own. Each format escapes and cuts them for itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcheck.core.base.causes import SINGLE, Bug, bugs
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, RunRecord
from kvcheck.core.report.story_text import show_line
from kvcheck.core.report.wording import (
    PROOF,
    SMALL,
    called_text,
    replay_line,
    shorter,
    small_line,
    wait_text,
    whole_proof_line,
    whose_text,
)

MOST_NAMED = 4
COPIED = frozenset({"again", "shown", "small", "story", "more"})
"""Labels of commands, which are to be copied whole."""
KNOWN_ANSWERS = "known-answers"
"""The oracle of running servers. Its findings name pages and positions of a request."""
PLACES = ("layer", "page", "row", "lane")
IN_REQUEST = {"page": "page {} of the request", "row": "position {}"}
UNKNOWN_CODE = ("unknown code", "This version does not know the code.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A likely cause. repeats: the same rule broken elsewhere. beside: findings of other codes in its cells."""

    bug: Bug
    repeats: tuple[Bug, ...] = ()
    beside: tuple[Bug, ...] = ()

    @property
    def finding(self) -> Finding:
        return self.bug.cause

    @property
    def is_conditional(self) -> bool:
        return self.finding.condition is not None

    @property
    def bugs(self) -> tuple[Bug, ...]:
        return (self.bug, *self.repeats, *self.beside)

    @property
    def others(self) -> tuple[Finding, ...]:
        return tuple(each for bug in self.bugs for each in bug.findings if each is not self.finding)

    @property
    def cells(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(cell for bug in (self.bug, *self.repeats) for cell in bug.cells))

    @property
    def title(self) -> str:
        known = CODES.get(self.finding.code)  # None: it is from a run that another version made
        return known.title if known else UNKNOWN_CODE[0]

    @property
    def meaning(self) -> str:
        known = CODES.get(self.finding.code)
        return known.meaning if known else UNKNOWN_CODE[1]

    @property
    def codes_beside(self) -> str:
        """Symptoms and findings of other codes, counted: "KV102 x5, KV501 x1"."""
        counts = Counter[str]()
        for bug in (self.bug, *self.repeats):
            counts.update(bug.symptoms)
        for bug in self.beside:
            counts[bug.cause.code] += len(bug.findings)
        return ", ".join(f"{code} x{count}" for code, count in counts.items())


def cards_of(findings: Sequence[Finding]) -> list[Card]:
    """Merge the causes over cells: of one code and oracle together, and with them those of the same cells alone."""
    alike: dict[tuple[object, ...], list[Bug]] = {}
    for bug in bugs(findings):
        alike.setdefault((bug.cause.code, bug.cause.oracle, bug.cause.condition), []).append(bug)
    cards: list[Card] = []
    for group in alike.values():
        first, *repeats = sorted(group, key=_unplaced)
        card = Card(bug=first, repeats=tuple(repeats))
        of = next((at for at, each in enumerate(cards) if _is_beside(card, each)), None)
        if of is None:
            cards.append(card)
        else:
            cards[of] = replace(cards[of], beside=(*cards[of].beside, first, *repeats))
    return cards


def _unplaced(bug: Bug) -> int:
    """Return 0 unless each finding stands alone: then those that name a place come first."""
    cause = bug.cause
    return (cause.layer is None) + (cause.page is None) if cause.oracle in SINGLE else 0


def _is_beside(card: Card, other: Card) -> bool:
    return card.is_conditional == other.is_conditional and set(card.cells) <= set(other.cells)


def facts_of(card: Card, record: RunRecord | None) -> dict[str, str]:
    """Return label to text, in reading order. record: of the run that stores it; None: lines are whole, no story."""
    finding, wait = card.finding, wait_text(card.finding)
    proved = next((each for each in card.bug.findings if each.minimal and "confirmed" in each.minimal), finding)
    shown, small = whole_proof_line(proved), small_line(finding)
    facts = {
        "what": finding.message,
        "where": where_text(finding),
        "whose": whose_text(finding),
        "called": called_text(finding),
        "missing": "" if wait.startswith("none") else wait,
        "proof": (proved.minimal or {}).get("confirmed"),
        "beside": card.codes_beside,
        "again": finding.replay if record is None else replay_line(record, finding),
        "shown": shown if record is None else shorter(shown, record, proved, PROOF),
        "small": small if record is None else shorter(small, record, finding, SMALL),
        "story": None if record is None else show_line(record, finding),
        "more": f"kvcheck explain {finding.code}",
    }
    return {label: str(text) for label, text in facts.items() if text}


def where_text(finding: Finding) -> str:
    names = IN_REQUEST if finding.oracle == KNOWN_ANSWERS else {}
    places = PLACES if finding.seen_request is not None else (*PLACES, "request")  # else `whose` names it
    placed = [(name, value) for name in places if (value := getattr(finding, name)) is not None]
    parts = [" ".join(filter(None, (finding.tier, finding.buffer)))]
    return ", ".join(filter(None, [*parts, *(names.get(name, f"{name} {{}}").format(value) for name, value in placed)]))


def seen_text(card: Card) -> str:
    """Return how often a cause was seen, with its cells, and what is beside it; "" for a finding alone."""
    if not card.others:
        return ""
    cells = f" in {cells_text(card.cells)}" if len(card.cells) > 1 else ""
    beside = f"; beside {card.codes_beside}" if card.codes_beside else ""
    return f"{counted(1 + len(card.others), 'finding')}{cells}{beside}"


def cells_text(cells: Sequence[str]) -> str:
    if len(cells) == 1:
        return cells[0]
    named = ", ".join(cells[:MOST_NAMED]) + (", …" if len(cells) > MOST_NAMED else "")
    return f"{counted(len(cells), 'cell')}: {named}"


def condition_text(card: Card) -> str:
    """Return the line of conditional findings."""
    found = counted(1 + len(card.others), "conditional finding")
    return f"{card.finding.code} {cells_text(card.cells)}: {found}, only if {card.finding.condition}"
