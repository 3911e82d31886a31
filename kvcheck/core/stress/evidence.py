"""EvidenceCount: how much a schedule exercised and verified.

Invariants:
- A foreign reuse is a resume into at least one page that another request was given after the retraction.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.record import Evidence
from kvcheck.core.stress.history import (
    Allocated,
    Expected,
    Handler,
    Restored,
    Resumed,
    Retracted,
    Saved,
    Submitted,
    Verified,
)


class EvidenceCount:
    """Counts events of one schedule."""

    def __init__(self) -> None:
        self._words: dict[str, int] = {}
        self._requests = 0
        self._retractions = 0
        self._resumes = 0
        self._foreign = 0
        self._transfers = 0
        self._clock = 0
        self._retracted_at: dict[int, int] = {}
        self._owners: dict[int, tuple[int, int, int, int]] = {}

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        """What is counted."""
        return (
            (Verified, self._verified),
            (Expected, self._expected),
            (Retracted, self._retracted),
            (Resumed, self._resumed),
            (Saved, self._saved),
            (Restored, self._restored),
            (Allocated, self._allocated),
            (Submitted, self._submitted),
        )

    def total(self, *, events: int, evictions: int, orderings: int) -> Evidence:
        """The counts so far. orderings: what the ordering oracle compared; 0 is nothing, so None."""
        return Evidence(
            schedules=1,
            events=events,
            requests=self._requests,
            retractions=self._retractions,
            resumes=self._resumes,
            foreign_reuses=self._foreign,
            device_evictions=evictions,
            transfers=self._transfers,
            words_verified=dict(sorted(self._words.items())),
            orderings_checked=orderings or None,
        )

    def _verified(self, event: Verified) -> None:
        self._words[event.buffer] = self._words.get(event.buffer, 0) + event.words

    def _expected(self, event: Expected) -> None:
        self._requests += 1

    def _retracted(self, event: Retracted) -> None:
        self._retractions += 1

    def _resumed(self, event: Resumed) -> None:
        self._resumes += 1

    def _saved(self, event: Saved) -> None:
        self._clock += 1
        self._retracted_at[event.request] = self._clock

    def _allocated(self, event: Allocated) -> None:
        if event.space != "full":
            return
        self._clock += 1
        for page in event.ids:
            owner, at, _, _ = self._owners.get(page, (0, 0, 0, 0))
            self._owners[page] = (event.owner, self._clock, owner, at)

    def _restored(self, event: Restored) -> None:
        since = self._retracted_at.get(event.request, 0)
        for page in event.pages:
            _, _, before, at = self._owners.get(page, (0, 0, 0, 0))
            if before not in (0, event.request) and at > since:
                self._foreign += 1
                return

    def _submitted(self, event: Submitted) -> None:
        if event.name == "loopback.land":
            self._transfers += 1
