"""RoundCell: a scenario's rounds, and the reasons why they are no pass.

Invariants:
- A pass has judged tokens, no finding, no unjudged request, and the scenario's evidence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

from kvcheck.core.base.record import Coverage, Evidence, Finding, ScenarioResult
from kvcheck.core.base.server_facts import KINDS, REQUIRED, TOKEN
from kvcheck.core.live.runner import RoundResult
from kvcheck.core.live.scenarios.scenario import ServerScenario
from kvcheck.core.run.cell import Cell, CellPlan, decided

MOST_REASONS = 4
BY_COUNT = ("hit", "hit-token", "lost-prefix", "host-hit", "storage-hit")
"""Evidence from the cached tokens that answers report."""


class RoundPlan(CellPlan, Protocol):
    def at(self, round_: int) -> Self: ...

    def line(self) -> str:
        """The argument of `kvcheck replay`."""


P = TypeVar("P", bound=RoundPlan)


@dataclass(slots=True, kw_only=True)
class RoundCell(Cell[P], Generic[P]):
    """The rounds of one scenario so far. flags: kind of evidence -> server setting that makes it appear."""

    scenario: ServerScenario
    flags: Mapping[str, str]
    evidence: Evidence = field(default_factory=lambda: Evidence(observed={TOKEN: 0}))
    found: list[Finding] = field(default_factory=list)
    why_not: str | None = None
    stopped: str | None = None
    reasons: list[str] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    elsewhere: str | None = None
    refuted: str | None = None

    @property
    def ran(self) -> int:
        return self.evidence.schedules

    @property
    def is_done(self) -> bool:
        return bool(self.ran >= self.wanted or self.findings or self.why_not or self.stopped)

    def stop(self, why: str) -> None:
        self.stopped = why

    def add(self, result: RoundResult) -> None:
        self.found += result.findings
        self.findings += len(result.findings)
        self.duration_s += result.duration_s
        self.elsewhere = self.elsewhere or result.elsewhere
        self.refuted = self.refuted or result.refuted
        self.evidence = self.evidence.plus(result.evidence)
        for kind, count in result.moved.items():
            self.moved[kind] = self.moved.get(kind, 0) + count
        self.reasons += [reason for reason in result.reasons if reason not in self.reasons]

    def lacks(self) -> str | None:
        told = [] if self.elsewhere is None else [self.elsewhere]
        return "; ".join([*told, *self._reasons()][:MOST_REASONS]) or None

    def beside(self) -> str | None:
        return self.elsewhere

    def coverage(self) -> Coverage:
        return Coverage(wanted=self.wanted, floor=self.floor)

    def total(self) -> Evidence:
        return dataclasses.replace(self.evidence, observed=self.observed)

    @property
    def observed(self) -> dict[str, int]:
        """Counts without doubtful ones: refuted cached counts, and lost prefixes if no answer ever reports a hit."""
        counts = self.evidence.observed
        doubtful = BY_COUNT if self.refuted else () if counts.get("hit") else ("lost-prefix",)
        return {kind: count for kind, count in counts.items() if kind not in doubtful}

    def _reasons(self) -> list[str]:
        if self.why_not is not None:
            return [self.why_not]
        if not self.evidence.observed.get("token"):
            return [*self.reasons, *([self.stopped] if self.stopped is not None else []), "no token was judged"]
        seen, flags = self.observed, self.advice
        lacking = [
            lack
            for kind, least in self.scenario.needs.items()
            if not (self.refuted and kind in BY_COUNT)
            and (lack := missing(kind, seen, least=least, flags=flags)) is not None
        ]
        kinds = self.scenario.any_of
        if kinds and not any(seen.get(kind) for kind in kinds):
            lacking += [missing(kinds[0], seen, least=1, flags=flags) or kinds[0]]
        cut = [] if self.is_done else ["the run ended before all of its rounds"]
        stopped = [self.stopped] if self.stopped is not None and lacking else []
        return [*self.reasons, *self._frozen(), *stopped, *lacking, *cut]

    @property
    def advice(self) -> Mapping[str, str]:
        """Settings to change. If cached tokens are reported as 0, the report is not the problem."""
        by = self.moved.get("hit-token", 0)
        if self.evidence.observed.get("hit") != 0:
            return self.flags
        own = f", and its own counter moved by {by:,}: the report is false, or others use the server" if by else ""
        see = (
            "see that its prefix cache is on (no --no-enable-prefix-caching, no --disable-radix-cache) and large enough"
        )
        return {**self.flags, **dict.fromkeys(("hit", "hit-token"), f"it reports cached tokens, as none{own}; {see}")}

    def _frozen(self) -> list[str]:
        said = self.evidence.observed.get("hit-token", 0)
        if self.refuted is not None:
            return [self.refuted]
        if self.moved.get("hit-token") != 0 or not said:
            return []
        return [
            f"answers count {said:,} cached tokens, and the server's own counter of them stood still or is not shown; "
            "name the engine's metrics with --metrics"
        ]


def common_place(findings: Sequence[Finding]) -> tuple[int | None, int, int] | None:
    """Return (layer, page of the request, requests) of the place that most wrong requests point to.

    None without a page, or for a tie. A finding with a page and no layer counts for every layer of that page.
    """
    places: dict[tuple[int | None, int], set[int | None]] = {}
    for finding in findings:
        if finding.page is not None:
            places.setdefault((finding.layer, finding.page), set()).add(finding.request)
    whole = {page for layer, page in places if layer is not None}
    for page in [page for layer, page in places if layer is None and page in whole]:
        by_page = places.pop((None, page))
        for other in places:
            places[other] |= by_page if other[1] == page else set()
    ranked = sorted(places, key=lambda place: -len(places[place]))
    if not ranked or (len(ranked) > 1 and len(places[ranked[0]]) == len(places[ranked[1]])):
        return None
    return (*ranked[0], len(places[ranked[0]]))


def missing(kind: str, observed: Mapping[str, int], *, least: int, flags: Mapping[str, str]) -> str | None:
    """Return why a count is too small for a pass, with the setting to change."""
    seen = observed.get(kind)
    if seen is not None and seen >= least:
        return None
    advice = flags.get(kind, "this engine says nothing of it")
    if seen is None:
        return f"{kind}: the server does not say how many {KINDS[kind].unit} there were; {advice}"
    return f"{kind}: {seen} of {least} {KINDS[kind].unit} ({KINDS[kind].meaning}); {advice}"


def requirements(
    asked: Mapping[str, int], total: Mapping[str, int], flags: Mapping[str, str], refuted: str | None = None
) -> list[ScenarioResult]:
    """A row for each --require. refuted: why cached counts are no evidence."""
    rows = []
    for kind, least in asked.items():
        lack = missing(kind, total, least=least, flags=flags)
        if lack is not None and refuted is not None and kind in BY_COUNT:
            lack = f"{kind}: {refuted}"
        verdict, code = decided(is_failed=False, reason=lack)
        rows.append(ScenarioResult(id=f"{REQUIRED}{kind}", shape=kind, verdict=verdict, code=code, reason=lack))
    return rows


def unseen(total: Mapping[str, int]) -> list[str]:
    return [kind for kind in KINDS if not total.get(kind)]
