"""EvidenceCount: counts the exercised events and verified words of a schedule.

A foreign reuse is a resume into at least one page that another request was given after the retraction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvcheck.core.base.record import Evidence
from kvcheck.core.base.situations import Situation
from kvcheck.core.cache.events import Allocated, Event, Evicted, LookedUp, RoomChanged
from kvcheck.core.cache.transfer.receiver import SUCCESS
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.workload.events import (
    Aborted,
    Expected,
    Happened,
    Restored,
    Resumed,
    Retracted,
    Retried,
    Saved,
    Transferred,
    Verified,
)


class EvidenceCount:
    def __init__(self) -> None:
        self._words: Counter[str] = Counter()
        self._counts: Counter[type] = Counter()
        self._foreign = 0
        self._transfers = 0
        self._clock = 0
        self._retracted_at: dict[int, int] = {}
        self._owners: dict[int, tuple[int, int, int, int]] = {}
        self._lookups: dict[int, LookedUp] = {}
        self._moved: Counter[str] = Counter()
        self._stored = 0
        self._host_evictions = 0
        self._during_load = 0
        self._situations: Counter[str] = Counter()

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            *((kind, self._count) for kind in (Expected, Retracted, Resumed, Aborted, Retried)),
            (Verified, self._verified),
            (Saved, self._saved),
            (Restored, self._restored),
            (Allocated, self._allocated),
            (LookedUp, self._looked_up),
            (Transferred, self._transferred),
            (Evicted, self._evicted),
            (RoomChanged, self._room_changed),
            (Happened, self._happened),
        )

    def total(self, *, events: int, evictions: int, orderings: int) -> Evidence:
        """The counts so far. orderings: pairs compared by the ordering oracle; 0 becomes None."""
        return Evidence(
            schedules=1,
            events=events,
            requests=self._counts[Expected],
            retractions=self._counts[Retracted],
            resumes=self._counts[Resumed],
            foreign_reuses=self._foreign,
            device_evictions=evictions,
            aborts=self._counts[Aborted] or None,
            retries=self._counts[Retried] or None,
            **self._tiers(),
            transfers=self._transfers,
            words_verified=dict(sorted(self._words.items())),
            orderings_checked=orderings or None,
            observed={},
            situations=dict(sorted(self._situations.items())),
        )

    def _tiers(self) -> dict[str, int]:
        if not any(self._moved.values()):
            return {}
        lookups = self._lookups.values()
        return {
            "lookups": len(lookups),
            "pages_wanted": sum(len(each.chain) for each in lookups),
            "device_hit_pages": sum(each.device_pages for each in lookups),
            "host_hit_pages": sum(each.pages - each.device_pages for each in lookups),
            "storage_hit_pages": self._stored,
            "backups": self._moved["backup"],
            "loads": self._moved["load"],
            "host_evictions": self._host_evictions,
            "host_evictions_during_load": self._during_load,
        }

    def _looked_up(self, event: LookedUp) -> None:
        self._lookups[event.request] = event

    def _transferred(self, event: Transferred) -> None:
        self._moved[event.kind] += 1
        self._stored += event.pages if event.kind == "prefetch" else 0

    def _evicted(self, event: Evicted) -> None:
        if event.tier == "host":
            self._host_evictions += 1
            self._during_load += event.during_load

    def _count(self, event: Event) -> None:
        self._counts[type(event)] += 1

    def _verified(self, event: Verified) -> None:
        self._words[event.buffer] += event.words

    def _saved(self, event: Saved) -> None:
        self._clock += 1
        self._retracted_at[event.request] = self._clock

    def _allocated(self, event: Allocated) -> None:
        if event.space not in ("full", "decode-0:full"):
            return
        self._clock += 1
        for page in event.ids:
            owner, at, _, _ = self._owners.get(page, (0, 0, 0, 0))
            self._owners[page] = (event.owner, self._clock, owner, at)

    def _restored(self, event: Restored) -> None:
        since = self._retracted_at.pop(event.request, None)
        if since is None:
            return  # another rank of the same request
        for page in event.pages:
            _, _, before, at = self._owners.get(page, (0, 0, 0, 0))
            if before not in (0, event.request) and at > since:
                self._foreign += 1
                return

    def _happened(self, event: Happened) -> None:
        self._situations[Situation(event.subject, event.state, event.happening).key] += 1

    def _room_changed(self, event: RoomChanged) -> None:
        self._transfers += event.new == SUCCESS
