"""Rules of the caching oracle on a page store: its whole objects are fetched, served and kept.

Invariants:
- A store may lose objects, unless the scenario emits StoreKeeps.
- A prefix with companions is judged only if the whole fetch came, and its companions lie within it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.cache.backend.backend import Submitted
from kvcheck.core.cache.events import Stored, StoreQueried
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.cache_model import ROOT, CachingRules
from kvcheck.core.stress.oracles.residency import SPACES, first_seen
from kvcheck.core.stress.workload.events import Aborted, Damaged, Deleted, StoreKeeps, Transferred

VAIN = 3
"""Most fetches in a row without a page. The builtin cache fetches once. An engine may try again, but has to compute the
pages in the end (vLLM #49328 never did)."""


@dataclass(slots=True)
class Fetch:
    """failed: pages of [start, stop) that did not come."""

    chain: tuple[bytes, ...]
    start: int
    stop: int
    is_wanted: bool = True
    failed: set[bytes] = field(default_factory=set)


class StoreRules(CachingRules):
    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, set[bytes]] = {space: set() for space in SPACES}
        self._doubtful: dict[str, set[bytes]] = {space: set() for space in SPACES}
        self._fetching: dict[int, Fetch] = {}
        self._gave_up_fetch = 0
        self._backed_up: dict[bytes, None] = {}  # pages, in order
        self._in_store: set[bytes] = set()  # pages that were queued for the store, or came from it
        self._vain: dict[int, int] = {}  # by request, its fetches in a row that brought nothing
        self._keeps = False
        self._damaged: set[str] = set()
        self._objects: dict[str, tuple[str, bytes]] = {}  # by key, space and hash of objects stored whole

    def store_handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (StoreQueried, self._asked),
            (Submitted, self._queued),
            (Stored, self._is_stored),
            (StoreKeeps, self._store_keeps),
            (Damaged, self._is_damaged),
            (Deleted, self._is_deleted),
            (Aborted, self._aborted),
            (Transferred, self._fetched),
        )

    def _is_deleted(self, event: Deleted) -> None:
        self._doubtful[event.space].update(event.chain)
        self._stored[event.space].difference_update(event.chain)

    def _store_keeps(self, event: StoreKeeps) -> None:
        self._keeps = True

    def _is_damaged(self, event: Damaged) -> None:
        self._damaged.add(event.key)
        if event.key in self._objects:
            space, each = self._objects[event.key]
            self._stored[space].discard(each)

    def _is_stored(self, event: Stored) -> None:
        if event.is_whole:
            self._stored[event.space].update(set(event.chain) - self._doubtful[event.space])
            self._objects |= {key: (event.space, each) for key, each in zip(event.keys, event.chain, strict=False)}
        else:
            self._judge_unserved(event)
            self._stored[event.space].difference_update(event.chain)
            for fetch in self._fetching.values():
                fetch.failed.update(event.chain)

    def _judge_unserved(self, event: Stored) -> None:
        if not self._keeps:
            return
        self.judged += 1
        for each, key in zip(event.chain, event.keys, strict=False):
            if each in self._stored[event.space] and key not in self._damaged:
                self.add(
                    "KV703",
                    f"the {event.space} {each.hex()[:8]} was stored whole, and nobody has deleted or damaged it; the "
                    "store was asked for it and did not serve it",
                    tier="storage",
                )
                return

    def _aborted(self, event: Aborted) -> None:
        self._vain.pop(event.request, None)
        if event.request in self._fetching:
            self._fetching[event.request].is_wanted = False

    def _asked(self, event: StoreQueried) -> None:
        if self._declared is None:
            return
        self._cache.learn(event.chain)
        self.judged += 1
        gave_up, self._gave_up_fetch = self._gave_up_fetch == event.request, 0
        start, stop = self._cache.fetchable(event.chain, self._stored)
        if event.is_fetching:
            self._fetching[event.request] = Fetch(event.chain, start, stop)
            self._judge_repeats(event)
            if start and self._cache.locks_host and not self._cache.is_locked("host", event.chain[start - 1]):
                self.add(
                    "KV703",
                    f"pages from {start} on of the prompt of request {event.request} are being fetched, and nothing "
                    "keeps the page before them on the host; without it they come for nothing",
                    request=event.request,
                    tier="host",
                )
            return
        lacking = frozenset(event.chain[start:])
        on_their_way = any(not lacking.isdisjoint(each.chain[each.start :]) for each in self._fetching.values())
        if stop > start and not gave_up and not on_their_way:
            self.add(
                "KV704",
                f"pages {start} to {stop - 1} of the prompt of request {event.request} are in the store, on no tier; "
                "they were not fetched, and nobody was refused room for them",
                request=event.request,
                tier="storage",
            )

    def _queued(self, event: Submitted) -> None:
        """A write to the store reads pages of the host and writes none."""
        if event.writes:
            return
        units = {unit for each in event.reads if each.space == "host.full" for unit in each.rows.tolist()}
        if units:
            held = self._cache.held["host", "full"]
            self._in_store.update(each for each, unit in held.items() if unit in units)

    def judge_unstored(self) -> None:
        """At the end of a run: every backup to the host was queued for the store behind it."""
        if not self._keeps:
            return
        self.judged += 1
        doubtful = self._doubtful["full"] | self._in_store
        missing = [each for each in self._backed_up if each not in doubtful]
        if missing:
            self.add(
                "KV704",
                f"{len(missing)} pages were backed up to the host and never queued for the store behind it, the first "
                f"of them {missing[0].hex()[:8]}",
                tier="storage",
            )

    def _judge_repeats(self, event: StoreQueried) -> None:
        if self._vain.get(event.request, 0) == VAIN:
            self.add(
                "KV706",
                f"request {event.request} waits for pages of the store, and began to fetch them again after {VAIN} "
                "fetches in a row that brought nothing",
                request=event.request,
                tier="storage",
            )

    def _fetched(self, event: Transferred) -> None:
        fetch = self._fetching.pop(event.request, None) if event.kind == "prefetch" else None
        if event.kind == "backup":
            self._backed_up |= dict.fromkeys(event.chain)
        if event.kind == "prefetch":
            self._in_store.update(event.chain)
            self._vain[event.request] = 0 if event.chain else self._vain.get(event.request, 0) + 1
        if fetch is not None and fetch.is_wanted:
            self._judge_fetch(event, fetch)

    def _judge_fetch(self, event: Transferred, fetch: Fetch) -> None:
        cache = self._cache
        before, behind = fetch.chain[: fetch.start], fetch.chain[fetch.start : fetch.stop]
        is_open = bool(event.chain) or not any(each in cache.pages for each in behind)
        is_open = is_open and cache.is_whole_on_host(before[-1] if before else ROOT)
        whole = next((at for at, each in enumerate(behind) if each in fetch.failed), len(behind))
        if not is_open or self._may_end_sooner(fetch):
            return
        self.judged += 1
        if len(event.chain) < whole:
            self.add(
                "KV703",
                f"of the prompt of request {event.request}, {whole} pages that the tiers lacked came whole from the "
                f"store; {len(event.chain)} were kept",
                request=event.request,
                tier="storage",
            )

    def _may_end_sooner(self, fetch: Fetch) -> bool:
        """A companion did not come, or may have left."""
        model = self._cache.model
        if not (model.has_state or model.window):
            return False
        is_behind = not model.window or first_seen(model, fetch.stop) >= fetch.start
        return not is_behind or not fetch.failed.isdisjoint(fetch.chain[fetch.start :])
