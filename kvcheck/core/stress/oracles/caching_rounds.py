"""Rules of the caching oracle on rounds: copies are acknowledged soon after they have run, and loads take turns.

    backup    reads the device, writes the host      found by the number of the transfer, through the host units
    load      reads the host, writes the device      the same; one operation may serve several
    prefetch  writes the host alone                  found by its request

Invariants:
- A copy has run once all operations on its host units have. It may wait for older copies of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Refused, TierChanged
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.cache_model import ROOT, CachingRules
from kvcheck.core.stress.oracles.residency import first_seen
from kvcheck.core.stress.workload.events import Answered, Moving, Reported, Transferred

COMPANIONS = ("window", "state")
LOOKS = 2
"""A finished copy is acknowledged, and a due backup is started, within so many looks of the cache at its copies, and
one round more. A cache may skip every other look."""
TURNS = 2
"""Loads for each engine, after which each has had one."""
HOST = "host."


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
                    self.add(
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
                self.add(
                    "KV605",
                    f"the cache says that {len(event.chain)} pages have left {' and '.join(event.tiers)}; "
                    f"{self._named(tier, 'full', each)} is still there",
                    tier=tier,
                )
        elif self._could_go(event):
            self.add(
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


@dataclass(slots=True, eq=False)
class _Copy:
    """name: its number, or the request of a prefetch. waited: rounds since it and all older ones of its kind have
    run."""

    kind: str
    name: int
    units: frozenset[tuple[str, int]] = frozenset()
    running: set[int] = field(default_factory=set)
    has_begun: bool = False
    waited: int = 0


class RoundRules(CachingRules):
    def __init__(self) -> None:
        super().__init__()
        self._rounds = 0
        self._made: dict[int, _Copy] = {}
        self._begun: dict[str, list[_Copy]] = {"backup": [], "load": [], "prefetch": []}
        self._running: dict[int, list[_Copy]] = {}
        self._load_lanes: set[str] = set()
        self._loads = 0

    def round_handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Moving, self._is_made),
            (Submitted, self._submitted),
            (Completed, self._completed),
            (Transferred, self._acknowledged),
            (Reported, self._round_over),
        )

    @property
    def _patience(self) -> int | None:
        rounds = self._declared.ack_rounds if self._declared is not None else None
        return None if rounds is None else LOOKS * rounds + 1

    def _judge_lanes(self) -> None:
        engines = self._declared.load_lanes if self._declared is not None else ()
        if self._loads < TURNS * len(engines):
            return
        self.judged += len(engines) > 1
        for lanes in engines:
            if self._load_lanes.isdisjoint(lanes):
                self.add(
                    "KV706",
                    f"{self._loads} loads take turns on {len(engines)} engines; none used {' or '.join(lanes)}",
                    tier="device",
                )

    def _is_made(self, event: Moving) -> None:
        units = frozenset((f"{HOST}{space}", unit) for space, ids in event.units for unit in ids)
        self._made[event.number] = _Copy(event.kind, event.number, units)

    def _submitted(self, event: Submitted) -> None:
        down, up = _on_host(event.writes), _on_host(event.reads)
        if down and not event.reads and event.request is not None:
            self._begin(_Copy("prefetch", event.request), event.ordinal)
        elif (down and event.reads) or (up and event.writes):
            touched = {(each.space, unit) for each in (*down, *up) for unit in each.rows.tolist()}
            kind = "backup" if down else "load"
            for_whom = [each for each in self._made.values() if each.kind == kind and each.units & touched]
            if kind == "load" and for_whom:
                self._loads += not all(each.has_begun for each in for_whom)
                self._load_lanes.add(event.lane)
            for each in for_whom:
                self._begin(each, event.ordinal)

    def _begin(self, copy: _Copy, ordinal: int) -> None:
        if not copy.has_begun:
            copy.has_begun = True
            self._begun[copy.kind].append(copy)
        copy.running.add(ordinal)
        self._running.setdefault(ordinal, []).append(copy)

    def _completed(self, event: Completed) -> None:
        for copy in self._running.pop(event.ordinal, ()):
            copy.running.discard(event.ordinal)

    def _acknowledged(self, event: Transferred) -> None:
        name = event.request if event.kind == "prefetch" else event.number
        self._made.pop(event.number, None)
        begun = self._begun[event.kind]
        if (copy := next((each for each in begun if each.name == name), None)) is not None:
            begun.remove(copy)
            if copy.running:
                self._early(copy)

    def _round_over(self, event: Reported) -> None:
        self._rounds += 1
        patience = self._patience
        if patience is None or self._is_over:
            return
        for begun in self._begun.values():
            for copy in tuple(begun):
                if copy.running:
                    break
                self.judged += not copy.waited
                copy.waited += 1
                if copy.waited > patience:
                    begun.remove(copy)
                    self._late(copy)

    def _early(self, copy: _Copy) -> None:
        self.add(
            "KV203",
            f"{_whose(copy)} is acknowledged before all of it has run",
            request=copy.name if copy.kind == "prefetch" else None,
            tier="host",
        )

    def _late(self, copy: _Copy) -> None:
        looks = self._declared.ack_rounds if self._declared is not None else None
        self.add(
            "KV706",
            f"{_whose(copy)} has run, and is not acknowledged {copy.waited} rounds later; "
            f"the cache looks every {looks}",
            request=copy.name if copy.kind == "prefetch" else None,
            tier="host",
        )


def _whose(copy: _Copy) -> str:
    return f"a prefetch for request {copy.name}" if copy.kind == "prefetch" else f"{copy.kind} {copy.name}"


def _on_host(footprints: Iterable[Footprint]) -> list[Footprint]:
    return [each for each in footprints if each.space.startswith(HOST)]
