"""The caching oracle: the work of a prefix cache, judged by a model of pages beside the product's tree.

    KV701 victims    an eviction takes the first evictable page of the declared order
    KV702 room       a backup, a load, a prefetch or a snapshot is given up only if no room can be made
    KV703 hits       computed pages are cached, leave a tier by eviction alone, and are served when found
    KV704 copies     backups that the write policy demands, and prefetches, are started, with their companions
    KV705 need       no eviction goes beyond the requested room
    KV706 turns      a finished copy is acknowledged within two looks, and loads use every engine
    KV203 copies     a copy is acknowledged only after all of it has run
    KV605 answers    answers to requests to evict or remove a prefix are true

Invariants:
- A cache is judged by the rules that it declares; without a declaration, not at all.
- A finding is reported only if it holds for every tie-break and every way to count uses.
- After the counts at the end the cache may free everything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvcheck.core.cache.events import (
    Allocated,
    Chosen,
    Computed,
    Flushed,
    Freed,
    Locked,
    LookedUp,
    Refused,
    RoomWanted,
    TierChanged,
)
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.cache_model import RANKS, ROOT, USES, Page, PlainCache, allocator_of
from kvcheck.core.stress.oracles.caching_rounds import AnswerRules, RoundRules
from kvcheck.core.stress.oracles.caching_store import StoreRules
from kvcheck.core.stress.workload.events import (
    Counted,
    Declared,
    Finished,
    Forward,
    Modelled,
    Reported,
    Sent,
    Transferred,
)

FEW = 0.75
"""A run with less than this share of a plain cache's hits is warned of."""
SOON = 24
"""Uses of the cache within which a backup that is due has to be started."""


@dataclass(frozen=True, slots=True)
class _Due:
    use: int
    round: int
    pages: dict[bytes, Page]


class CachingOracle(StoreRules, RoundRules, AnswerRules):
    def __init__(self) -> None:
        super().__init__()
        self._chosen: dict[tuple[str, str], tuple[bytes, ...]] = {}
        self._wanted: dict[str, tuple[int, int]] = {}  # by allocator: units requested, and freed since
        self._refused: set[bytes] = set()
        self._due: deque[_Due] = deque()
        self._due_long = 0
        self._backups_seen = False
        self._served: dict[int, int] = {}
        self._prompts: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self._plain = PlainCache(0)
        self._hits: dict[int, tuple[int, int]] = {}
        self._offered: dict[int, int] = {}

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Modelled, self._modelled),
            (Declared, self._is_declared),
            (Allocated, self._allocated),
            (Freed, self._freed),
            (Sent, self._is_sent),
            (LookedUp, self._looked_up),
            (Forward, self._forward),
            (Computed, self._computed),
            (Locked, self._cache.lock),
            (TierChanged, self._changed),
            (Chosen, self._is_chosen),
            (Flushed, self._is_flushed),
            (Refused, self._is_refused),
            (RoomWanted, self._is_wanted),
            (Transferred, self._cache.arrived),
            *self.store_handlers(),
            *self.round_handlers(),
            *self.answer_handlers(),
            (Reported, self._reported),
            (Finished, self._finished),
            (Counted, self._counted),
        )

    def finish(self) -> None:
        self._judge_lanes()
        if self._is_over and not self.findings:  # pages that were lost were never stored either
            self.judge_unstored()
        if self._due_long and not self._backups_seen:
            self.add(
                "KV704",
                f"backups of {self._due_long} pages were due long ago; in the whole run none was started or refused",
                tier="host",
            )

    @property
    def note(self) -> str | None:
        """A warning if the run has served far less than a plain cache. Prefixes with companions, or backed up at a
        later use, are kept less often by design."""
        served, plain = (sum(each) for each in zip(*self._hits.values(), strict=True)) if self._hits else (0, 0)
        model, uses = self._cache.model, self._declared.uses if self._declared is not None else None
        if model.has_state or model.window or uses not in (1, None) or served >= plain * FEW:
            return None
        return (
            f"the prefix cache served {served} pages of prompts; a cache of its size that gives up the least recently "
            f"used page and never locks serves {plain}"
        )

    # The rules, and how much is allocated

    def _modelled(self, event: Modelled) -> None:
        self._cache.model = event

    def _is_declared(self, event: Declared) -> None:
        self._declared = event
        self._cache.declare(event)
        self._plain = PlainCache(
            max((units for name, units in event.units if name in ("full", "host.full")), default=0)
        )

    def _allocated(self, event: Allocated) -> None:
        self._cache.taken[event.space] += len(event.ids)

    def _freed(self, event: Freed) -> None:
        self._cache.taken[event.space] -= len(event.ids)
        if event.space in self._wanted:
            wanted, freed = self._wanted[event.space]
            self._wanted[event.space] = wanted, freed + len(event.ids)

    def _counted(self, event: Counted) -> None:
        self._is_over = True

    # Lookups: loads, and pages served

    def _is_sent(self, event: Sent) -> None:
        self._prompts[event.request] = event.prompt

    def _looked_up(self, event: LookedUp) -> None:
        if self._declared is None:
            return
        self._used()
        pages = max(0, self._prompts.get(event.request, 0) - 1) // self._cache.model.page_size
        if len(event.chain) < pages:
            self.add(
                "KV703",
                f"{len(event.chain)} pages of the prompt of request {event.request} were looked up; the last of its "
                f"{self._prompts[event.request]} tokens has to be computed, and {pages} whole pages lie before it",
                request=event.request,
            )
        if event.device_only:
            self._judge_load(event)
            if self._due and self._due[-1].use == self._cache.clock:
                self._due.pop()  # of the try before, which served nothing
        self._cache.look_up(event)
        self._served[event.request] = event.pages * self._cache.model.page_size
        self._offered[event.request] = event.pages
        plain = self._hits[event.request][1] if event.device_only and event.request in self._hits else None
        self._hits[event.request] = event.pages, self._plain.look_up(event.chain) if plain is None else plain
        self._note_due(event.chain[: event.pages])

    def _judge_load(self, event: LookedUp) -> None:
        """A lookup leaves out pages of the host only if a space of the device is full."""
        pages, lacking = self._cache.given_up(event)
        if pages <= event.pages:
            return
        self.judged += 1
        path = frozenset(event.chain[:pages])
        room = {space: self._cache.room("device", space, besides=path) for space in lacking}
        if all(room[space] >= count for space, count in lacking.items()):
            wanted = _in_words(lacking)
            self.add(
                "KV702",
                f"request {event.request} was served {event.pages} of the {pages} pages that both tiers hold of its "
                f"prompt, and {wanted} were not loaded back; the device has room, free or evictable, for "
                f"{_in_words({space: room[space] for space, count in lacking.items() if count})}",
                request=event.request,
                tier="device",
            )

    def _forward(self, event: Forward) -> None:
        found = self._served.pop(event.request, None)
        if found is not None:
            self.judged += 1
            if event.start < found:
                self.add(
                    "KV703",
                    f"request {event.request} computes its prompt from token {event.start} on; "
                    f"its lookup found the first {found} tokens cached",
                    request=event.request,
                )
        if event.stop > self._committed.get(event.request, 0):
            self._committed[event.request] = event.stop

    # Computed pages are cached

    def _computed(self, event: Computed) -> None:
        if self._declared is None:
            return
        self._used()
        self._cache.compute(event)
        self._plain.keep(event.chain)
        self._offered[event.request] = len(event.chain)

    def _used(self) -> None:
        for each in self._cache.growing:
            self.add("KV703", f"a page that was computed and offered is not cached on the device ({each.hex()[:8]})")
            break
        self._cache.growing = {}
        while self._due and self._due[0].use + SOON <= self._cache.clock:
            self._judge_backups(self._due.popleft())

    def _reported(self, event: Reported) -> None:
        patience = self._patience
        while patience is not None and self._due and self._due[0].round + patience < self._rounds:
            self._judge_backups(self._due.popleft())

    def _finished(self, event: Finished) -> None:
        """A finished request has offered every whole page that it computed."""
        offered, committed = self._offered.pop(event.request, None), self._committed.pop(event.request, 0)
        model = self._cache.model
        if offered is None or model.has_state:  # a prefix with states ends at a kept state
            return
        self.judged += 1
        if offered < committed // model.page_size:
            self.add(
                "KV703",
                f"request {event.request} ended with {committed // model.page_size} whole pages, "
                f"of which {offered} were cached or offered to the cache",
                request=event.request,
            )

    def _changed(self, event: TierChanged) -> None:
        if self._declared is None or self._is_over:
            return
        if event.added:
            self._judge_hashes(event)
        elif event.chain:
            self._judge_loss(event)
        self._backups_seen |= event.added and event.tier == "host"
        self._note_companions(event)
        self._note_due(self._cache.change(event))

    def _judge_hashes(self, event: TierChanged) -> None:
        """A page under another hash than a prompt's is lost, or found by a wrong prompt."""
        self.judged += 1
        for each, unit in zip(event.chain, event.ids, strict=True):
            if not self._cache.knows(each):
                self.add(
                    "KV703",
                    f"{event.tier} {event.space} {unit} is kept under the hash {each.hex()[:8]}; no page of a prompt "
                    "that was looked up, fetched or computed has this hash",
                    tier=event.tier,
                    page=unit,
                )
                return

    def _judge_loss(self, event: TierChanged) -> None:
        self.judged += 1
        lost = next((each for each in event.chain if not self._is_evicted(event, each)), None)
        if lost is not None:
            self.add(
                "KV703",
                f"{event.tier} {event.space} {self._unit(event.tier, event.space, lost)} is given back; "
                "neither it nor a prefix of it was chosen for eviction",
                tier=event.tier,
                page=self._unit(event.tier, event.space, lost),
            )
        if (event.tier, event.space) != ("device", "full") or self._declared is None:
            return
        if self._declared.uses is None and self._cache.has_host:
            end = event.chain[-1]
            if not self._cache.is_backed(end) and end not in self._refused:
                self.add(
                    "KV704",
                    f"device full {self._unit('device', 'full', end)} is given up under write-back without a backup; "
                    "none was refused",
                    tier="device",
                    page=self._unit("device", "full", end),
                )

    def _is_evicted(self, event: TierChanged, each: bytes) -> bool:
        """The page was chosen, as pages or in this space, or it continues a chosen prefix without a backup."""
        tier = event.tier
        if each in self._chosen.get((tier, event.space), ()) or each in self._chosen.get((tier, "full"), ()):
            return True
        root, at = self._chosen.get(("device", "full"), (ROOT,))[-1], self._cache.parent(each)
        while at not in (ROOT, root):
            at = self._cache.parent(at)
        return at != ROOT and not self._cache.is_backed(root)

    # Eviction

    def _is_flushed(self, event: Flushed) -> None:
        for tier in event.tiers:
            self._chosen[tier, "full"] = event.chain
        if len(event.tiers) > 1:
            self._refused.update(event.chain)

    def _is_wanted(self, event: RoomWanted) -> None:
        self._wanted[allocator_of(event.tier, event.space)] = event.units, 0

    def _is_chosen(self, event: Chosen) -> None:
        if self._declared is None or self._is_over or not event.chain:
            return
        self.judged += 1
        self._judge_need(event)
        self._chosen[event.tier, event.space] = event.chain
        if (event.tier, event.space) == ("device", "full"):
            self._refused.clear()
        end, tier, space = event.chain[-1], event.tier, event.space
        victim = self._named(tier, space, end)
        if (why := self._cache.stays(tier, space, end)) is not None and space == "full":
            self.add("KV701", f"{victim} is chosen for eviction; it {why}", tier=tier)
            return
        order = dict(self._declared.orders).get(tier)
        if order not in RANKS:
            return
        rank = RANKS.index(order)
        pages = self._cache.pages
        lowest = min((pages[each].least[rank] for each in event.chain if each in pages), default=0)
        others = self._cache.candidates(tier, space, passed={*event.passed, *event.chain})
        first = min(others, key=lambda each: pages[each].most[rank] if each in pages else lowest, default=None)
        if first is not None and first in pages and pages[first].most[rank] < lowest:
            self.add(
                "KV701",
                f"{victim} is chosen for eviction by {order}, its {_RANK_NAMES[rank]} is {lowest} or higher; "
                f"{self._named(tier, space, first)} could go, and its {_RANK_NAMES[rank]} is {pages[first].most[rank]}",
                tier=tier,
            )

    def _judge_need(self, event: Chosen) -> None:
        wanted, freed = self._wanted.get(allocator_of(event.tier, event.space), (0, 0))
        if 0 < wanted <= freed:
            self.add(
                "KV705",
                f"{self._named(event.tier, event.space, event.chain[-1])} is chosen for eviction; room for {wanted} "
                f"was asked for, and {freed} were freed before",
                tier=event.tier,
            )

    # Backups

    def _note_due(self, chain: Iterable[bytes]) -> None:
        uses = self._declared.uses if self._declared is not None else None
        if uses is None or not self._cache.has_host:
            return
        due: dict[bytes, Page] = {}
        for each in chain:
            page, parent = self._cache.pages.get(each), self._cache.parent(each)
            if (
                page is not None
                and page.least[USES] >= uses
                and each in self._cache.held["device", "full"]
                and not self._cache.is_backed(each)
                and (parent in due or self._cache.is_backed(parent))
            ):
                due[each] = page
        if due:
            self._due.append(_Due(self._cache.clock, self._rounds, due))

    def _judge_backups(self, due: _Due) -> None:
        self.judged += 1
        self._due_long += len(due.pages)
        refused: set[bytes] = set()
        for each, page in due.pages.items():
            if page.refused_at >= due.use or self._cache.parent(each) in refused:
                refused.add(each)  # and with it the pages behind it: their prefix was not backed up
                continue
            is_open = (
                self._cache.pages.get(each) is page
                and each in self._cache.held["device", "full"]
                and self._cache.is_backed(self._cache.parent(each))
                and page.backed_at < due.use
            )
            if is_open:
                self.add(
                    "KV704",
                    f"{self._named('device', 'full', each)} is not backed up, {self._rounds - due.round} rounds and "
                    f"{self._cache.clock - due.use} uses of the cache after that was due; the prefix before it is, and "
                    "no backup of it was refused",
                    tier="device",
                )
                self._backups_seen = True  # their absence is reported
                return

    def _is_refused(self, event: Refused) -> None:
        if self._declared is None:
            return
        self.judged += 1
        if event.kind == "prefetch":
            self._gave_up_fetch = event.request
        elif event.kind == "backup" and event.space == "full":
            self._backups_seen = True
            self._refused.update(event.chain)
            for each in event.chain:
                if (page := self._cache.pages.get(each)) is not None:
                    page.refused_at = self._cache.clock
        tier = "device" if event.kind == "snapshot" else "host"
        room = self._cache.room(tier, event.space)
        if room >= len(event.chain):
            self.add(
                "KV702",
                f"a {event.kind} of {len(event.chain)} {event.space} for request {event.request} is given up; "
                f"the {tier} has room, free or evictable, for {room}",
                request=event.request,
                tier=tier,
            )


_RANK_NAMES = ("last use", "count of uses", "priority")


def _in_words(counts: dict[str, int]) -> str:
    return " and ".join(f"{count} {space}" for space, count in counts.items() if count)
