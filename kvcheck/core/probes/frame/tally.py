"""Tally: what one schedule of a probe has judged, counted and found.

Invariants:
- Needs no tensor library: a probe of an engine that has none counts in it too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcheck.core.base.record import Evidence, Finding


@dataclass(slots=True)
class Tally:
    """What one schedule of a probe has compared and found. counts: fields of Evidence."""

    words: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def count(self, name: str, more: int = 1) -> None:
        """Count more of a field of Evidence."""
        self.counts[name] = self.counts.get(name, 0) + more

    def note(self, text: str) -> None:
        """Something for the record, once."""
        if text not in self.notes:
            self.notes.append(text)

    def find(self, code: str, oracle: str, message: str, **more: object) -> None:
        """Add a finding. Only the first of each code, buffer, lane and condition is kept."""
        self.keep(Finding(code=code, oracle=oracle, message=message, **more))  # type: ignore[arg-type]

    def keep(self, found: Finding) -> None:
        """Add a finding, unless its like is there."""
        place = (found.code, found.buffer, found.lane, found.condition)
        if place not in [(each.code, each.buffer, each.lane, each.condition) for each in self.findings]:
            self.findings.append(found)

    def evidence(self) -> Evidence:
        """For the record. events: reads that were judged."""
        return Evidence(
            schedules=1, events=self.reads, words_verified=dict(self.words), observed={}, situations={}, **self.counts
        )
