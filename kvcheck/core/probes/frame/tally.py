"""Tally: comparisons, counts and findings of one schedule of a probe.

It needs no tensor library, since an engine's environment may have none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvcheck.core.base.record import Evidence, Finding


@dataclass(slots=True)
class ProbeTally:
    """Comparisons and findings of one schedule. counts: fields of Evidence. called: text of the engine's functions
    that a finding is about, or ""."""

    words: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    called: Callable[[Finding], str] = lambda _: ""

    def count(self, name: str, more: int = 1) -> None:
        self.counts[name] = self.counts.get(name, 0) + more

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def find(self, code: str, oracle: str, message: str, **more: object) -> None:
        """Add a finding. Only the first of each code, buffer, lane and condition is kept."""
        self.keep(Finding(code=code, oracle=oracle, message=message, **more))  # type: ignore[arg-type]

    def keep(self, found: Finding) -> None:
        place = (found.code, found.buffer, found.lane, found.condition)
        if place not in [(each.code, each.buffer, each.lane, each.condition) for each in self.findings]:
            text = "" if found.minimal else self.called(found)
            self.findings.append(replace(found, minimal={"called": text}) if text else found)

    def evidence(self) -> Evidence:
        return Evidence(
            schedules=1, events=self.reads, words_verified=dict(self.words), observed={}, situations={}, **self.counts
        )
