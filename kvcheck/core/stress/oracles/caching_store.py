"""Rules of the caching oracle on a page store: what it holds whole is fetched, served and kept.

Invariants:
- What somebody else deleted is expected of the store no more.
- A prefix with companions may end sooner than its pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.cache_model import ROOT
from kvcheck.core.stress.oracles.caching_rules import CachingRules
from kvcheck.core.stress.oracles.residency import SPACES
from kvcheck.core.workload.events import Aborted
from kvcheck.core.workload.tier_events import Asked, Deleted, Stored, Transferred


@dataclass(slots=True)
class Fetch:
    """Pages [start, stop) of a prompt that the store holds whole, on their way. failed: of them, what did not come."""

    chain: tuple[bytes, ...]
    start: int
    stop: int
    is_wanted: bool = True
    failed: set[bytes] = field(default_factory=set)


class StoreRules(CachingRules):
    """What the store holds is fetched where both tiers lack it, and what comes whole is kept."""

    def __init__(self) -> None:
        super().__init__()
        self._stored: dict[str, set[bytes]] = {space: set() for space in SPACES}
        self._doubtful: dict[str, set[bytes]] = {space: set() for space in SPACES}
        self._fetching: dict[int, Fetch] = {}
        self._gave_up_fetch = 0

    def store_handlers(self) -> Iterable[tuple[type, Handler]]:
        """The kinds of event that these rules read."""
        return (
            (Asked, self._asked),
            (Stored, self._is_stored),
            (Deleted, self._is_deleted),
            (Aborted, self._aborted),
            (Transferred, self._fetched),
        )

    def _is_deleted(self, event: Deleted) -> None:
        """Nothing is expected of these any more."""
        self._doubtful[event.space].update(event.chain)
        self._stored[event.space].difference_update(event.chain)

    def _is_stored(self, event: Stored) -> None:
        if event.is_whole:
            self._stored[event.space].update(set(event.chain) - self._doubtful[event.space])
        else:
            self._stored[event.space].difference_update(event.chain)
            for fetch in self._fetching.values():
                fetch.failed.update(event.chain)

    def _aborted(self, event: Aborted) -> None:
        if event.request in self._fetching:
            self._fetching[event.request].is_wanted = False

    def _asked(self, event: Asked) -> None:
        """Pages that both tiers lack and the store holds are fetched, unless they are on their way or there is no
        room."""
        if self._declared is None:
            return
        self._cache.learn(event.chain)
        self.judged += 1
        gave_up, self._gave_up_fetch = self._gave_up_fetch == event.request, 0
        start, stop = self._cache.fetchable(event.chain, self._stored)
        if event.is_fetching:
            self._fetching[event.request] = Fetch(event.chain, start, stop)
            return
        lacking = frozenset(event.chain[start:])
        on_their_way = any(not lacking.isdisjoint(each.chain[each.start :]) for each in self._fetching.values())
        if stop > start and not gave_up and not on_their_way:
            self._add(
                "KV704",
                f"pages {start} to {stop - 1} of the prompt of request {event.request} are in the store, on no tier; "
                "they were not fetched, and nobody was refused room for them",
                request=event.request,
                tier="storage",
            )

    def _fetched(self, event: Transferred) -> None:
        fetch = self._fetching.pop(event.request, None) if event.kind == "prefetch" else None
        if fetch is not None and fetch.is_wanted:
            self._judge_fetch(event, fetch)

    def _judge_fetch(self, event: Transferred, fetch: Fetch) -> None:
        """What came whole is kept, unless the tiers have changed around it. A prefix with companions may end sooner."""
        cache = self._cache
        before, behind = fetch.chain[: fetch.start], fetch.chain[fetch.start : fetch.stop]
        is_open = bool(event.chain) or not any(each in cache.pages for each in behind)
        is_open = is_open and cache.is_whole_on_host(before[-1] if before else ROOT)
        whole = next((at for at, each in enumerate(behind) if each in fetch.failed), len(behind))
        if cache.model.has_state or cache.model.window or not is_open:
            return
        self.judged += 1
        if len(event.chain) < whole:
            self._add(
                "KV703",
                f"of the prompt of request {event.request}, {whole} pages that the tiers lacked came whole from the "
                f"store; {len(event.chain)} were kept",
                request=event.request,
                tier="storage",
            )
