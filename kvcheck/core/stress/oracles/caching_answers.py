"""Rules of the caching oracle on companions of backups, and on answers to requests to evict or remove a prefix.

    backup     of pages      includes the states, and the window pages visible from its end, that the device holds
    answer     it is gone    no page of it is left on the tiers
               it stays      it is locked, or has continuations

Invariants:
- KV702 judges a companion whose backup was refused for lack of room.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.cache_model import ROOT
from kvcheck.core.stress.oracles.caching_rules import CachingRules
from kvcheck.core.stress.oracles.residency import first_seen
from kvcheck.core.stress.workload.tier_events import Answered, Refused, TierChanged, Transferred

COMPANIONS = ("window", "state")


class AnswerRules(CachingRules):
    def __init__(self) -> None:
        super().__init__()
        self._lacking: dict[bytes, set[str]] = {}  # by page that came to the host, its companions that did not yet
        self._without_room: set[tuple[str, bytes]] = set()

    def answer_handlers(self) -> Iterable[tuple[type, Handler]]:
        return ((Answered, self._is_answered), (Refused, self._companion_refused), (Transferred, self._backed_up_whole))

    # Companions

    def _companion_refused(self, event: Refused) -> None:
        if event.kind == "backup" and event.space in COMPANIONS:
            self._without_room.update((event.space, each) for each in event.chain)

    def _note_companions(self, event: TierChanged) -> None:
        if event.tier != "host" or not event.added:
            return
        if event.space != "full":
            for each in event.chain:
                self._lacking.get(each, set()).discard(event.space)
            return
        held, seen = self._cache.held, self._seen_from_end(event.chain)
        for each in event.chain:
            spaces = {"state"} | ({"window"} if each in seen else set())
            self._lacking[each] = {
                space
                for space in spaces
                if each in held["device", space]
                and each not in held["host", space]
                and (space, each) not in self._without_room
            }
            self._without_room.difference_update((space, each) for space in COMPANIONS)

    def _seen_from_end(self, chain: tuple[bytes, ...]) -> frozenset[bytes]:
        """The last pages of a prefix that the position behind it sees through the window."""
        model = self._cache.model
        if not model.window or not chain:
            return frozenset()
        pages, at = 0, chain[-1]
        while at != ROOT:
            pages, at = pages + 1, self._cache.parent(at)
        return frozenset(chain[-(pages - first_seen(model, pages)) :])

    def _backed_up_whole(self, event: Transferred) -> None:
        if event.kind != "backup":
            return
        self.judged += 1
        for each in event.chain:
            for space in sorted(self._lacking.pop(each, ())):
                if each in self._cache.held["device", space]:
                    self._add(
                        "KV704",
                        f"{self._named('device', 'full', each)} was backed up without its {space}, which the device "
                        "holds; no room was refused for that",
                        request=event.request,
                        tier="host",
                    )
                    return

    # Answers

    def _is_answered(self, event: Answered) -> None:
        if self._declared is None or self._is_over or not event.chain:
            return
        self.judged += 1
        if event.is_gone:
            left = [(tier, each) for tier in event.tiers for each in event.chain if each in self._held_on(tier)]
            if left:
                tier, each = left[0]
                self._add(
                    "KV605",
                    f"the cache says that {len(event.chain)} pages have left {' and '.join(event.tiers)}; "
                    f"{self._named(tier, 'full', each)} is still there",
                    tier=tier,
                )
        elif self._could_go(event):
            self._add(
                "KV605",
                f"the cache says that {len(event.chain)} pages have to stay on {' and '.join(event.tiers)}; nothing "
                f"locks them or hangs on them, from {event.chain[0].hex()[:8]} on",
                tier=event.tiers[0],
            )

    def _held_on(self, tier: str) -> dict[bytes, int]:
        return self._cache.held[tier, "full"]

    def _could_go(self, event: Answered) -> bool:
        cache = self._cache
        if any(cache.is_locked(tier, each) for tier in ("device", "host") for each in event.chain):
            return False
        return len(event.tiers) > 1 or cache.stays(event.tiers[0], "full", event.chain[-1]) is None
