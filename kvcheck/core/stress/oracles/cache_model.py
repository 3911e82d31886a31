"""CacheModel: uses, priorities, locks and room of a cache on two tiers, by hashes of pages.

Invariants:
- It is made from events alone, without the product's tree.
- If readings of the declared order count a use differently, `least` and `most` are the ends of the range.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field

from kvcheck.core.cache.events import Computed, Locked, LookedUp, TierChanged
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.oracles.residency import SPACES, first_seen, longest_prefix
from kvcheck.core.stress.workload.events import Declared, Modelled, Transferred

RANKS = ("lru", "lfu", "priority")
"""The first number that each eviction order compares: last use, uses, priority. Ties may be broken in any way."""
USED, USES, PRIORITY = range(len(RANKS))
ROOT = b""


class PlainCache:
    def __init__(self, pages: int) -> None:
        self._room = pages
        self._held: dict[bytes, None] = {}

    def look_up(self, chain: tuple[bytes, ...]) -> int:
        found = next((at for at, each in enumerate(chain) if each not in self._held), len(chain))
        self._use(chain[:found])
        return found

    def keep(self, chain: tuple[bytes, ...]) -> None:
        self._use(chain)
        while len(self._held) > self._room:
            del self._held[next(iter(self._held))]

    def _use(self, chain: Iterable[bytes]) -> None:
        """The end of a prefix is evicted before its beginning."""
        for each in reversed([*chain]):
            self._held.pop(each, None)
            self._held[each] = None


class CachingRules(Oracle):
    name = "caching"

    def __init__(self) -> None:
        super().__init__()
        self._cache = CacheModel()
        self._declared: Declared | None = None
        self._is_over = False

    def _unit(self, tier: str, space: str, each: bytes) -> int | None:
        return self._cache.held[tier, space].get(each)

    def _named(self, tier: str, space: str, each: bytes) -> str:
        return f"{tier} {space} {self._unit(tier, space, each)}"


@dataclass(slots=True, eq=False)
class Page:
    """least, most: a number for each of RANKS, by the readings that count the fewest and the most uses. backed_at,
    refused_at: the use at which its last backup was made, or refused."""

    least: list[int]
    most: list[int] = field(default_factory=list)
    backed_at: int = -1
    refused_at: int = -1


class CacheModel:
    """clock: counts uses of the cache: lookups and computed prefixes. locks_host: some page was locked on the host, so
    locks keep pages there."""

    def __init__(self) -> None:
        self.model = Modelled(page_size=1, window=0, has_state=False)
        self.clock = 0
        self.pages: dict[bytes, Page] = {}
        self.held: defaultdict[tuple[str, str], dict[bytes, int]] = defaultdict(dict)
        self.growing: dict[bytes, None] = {}
        self.taken: Counter[str] = Counter()
        self._units: dict[str, int] = {}
        self._priority = 0
        self._parents: dict[bytes, bytes] = {}
        self._children: dict[str, Counter[bytes]] = {"device": Counter(), "any": Counter()}
        self.locks_host = False
        self._locks: dict[str, Counter[bytes]] = {"device": Counter(), "host": Counter()}
        self._arriving: set[bytes] = set()
        self._lookup: tuple[int, list[tuple[Page, list[int]]]] = (0, [])

    @property
    def has_host(self) -> bool:
        return "host.full" in self._units

    # Events

    def declare(self, event: Declared) -> None:
        self._units = dict(event.units)

    def learn(self, chain: tuple[bytes, ...]) -> None:
        if chain and chain[-1] not in self._parents:
            for before, each in zip((ROOT, *chain), chain, strict=False):
                self._parents[each] = before

    def knows(self, each: bytes) -> bool:
        return each in self._parents

    def look_up(self, event: LookedUp) -> None:
        """Count a use of the served pages. A retry without host pages replaces the request's first lookup."""
        self.clock += 1
        self.learn(event.chain)
        request, before = self._lookup
        if event.device_only and request == event.request:
            for page, least in before:
                page.least[:] = least
        served = [self.pages[each] for each in event.chain[: event.pages] if each in self.pages]
        self._lookup = event.request, [(page, page.least.copy()) for page in served]
        for page in served:
            for ends in (page.least, page.most):
                ends[USED] = self.clock
                ends[USES] += 1
                ends[PRIORITY] = max(ends[PRIORITY], event.priority)

    def compute(self, event: Computed) -> None:
        """Whether that uses the prefix's cached pages is left open."""
        self.clock += 1
        self.learn(event.chain)
        self._priority = event.priority
        self.growing = dict.fromkeys(each for each in event.chain if each not in self.held["device", "full"])
        for each in event.chain:
            if (page := self.pages.get(each)) is not None:
                page.most[USED] = self.clock
                page.most[USES] += 1
                page.most[PRIORITY] = max(page.most[PRIORITY], event.priority)

    def lock(self, event: Locked) -> None:
        self.locks_host = self.locks_host or event.tier == "host"
        locks, at = self._locks[event.tier], event.end
        while at != ROOT:
            locks[at] += 1 if event.added else -1
            at = self._parents.get(at, ROOT)

    def change(self, event: TierChanged) -> list[bytes]:
        """Add or remove pages of a tier. Return those just computed and now cached on the device."""
        held, grown = self.held[event.tier, event.space], []
        before = ROOT
        for each, unit in zip(event.chain, event.ids, strict=True):
            if event.space == "full":
                self._parents.setdefault(each, before)
                before = each
                if event.added and each not in held:
                    grown += self._gain(each, event.tier)
                elif not event.added and each in held:
                    self._lose(each, event.tier)
            if event.added:
                held[each] = unit
            else:
                held.pop(each, None)
        return grown

    def arrived(self, event: Transferred) -> None:
        if event.kind != "load":
            self._arriving.difference_update(event.chain)

    def _gain(self, each: bytes, tier: str) -> list[bytes]:
        parent = self._parents[each]
        page = self.pages.get(each)
        is_grown = tier == "device" and each in self.growing
        if page is None:
            ranks = [self.clock, 0, self._priority if is_grown else 0]
            page = self.pages[each] = Page(ranks, ranks.copy())
            self._children["any"][parent] += 1
            page.most[USES] += is_grown
        if tier == "host":
            page.backed_at = self.clock
            self._arriving.add(each)
            return []
        self._children["device"][parent] += 1
        if not is_grown:
            return []
        del self.growing[each]
        page.least[USED] = self.clock
        page.least[USES] += 1
        return [each]

    def _lose(self, each: bytes, tier: str) -> None:
        parent = self._parents[each]
        if tier == "device":
            self._children["device"][parent] -= 1
        else:
            self._arriving.discard(each)
        if each not in self.held["host" if tier == "device" else "device", "full"]:
            self._children["any"][parent] -= 1
            del self.pages[each]

    # Eviction

    def candidates(self, tier: str, space: str, *, passed: Container[bytes] = ()) -> Iterator[bytes]:
        """Pages that an eviction could choose first: unlocked, and leaves."""
        for each in self.held[tier, space]:
            if each not in passed and self.stays(tier, space, each) is None:
                yield each

    def stays(self, tier: str, space: str, each: bytes) -> str | None:
        on_device = self.held["device", "full"]
        if each not in self.held[tier, space]:
            return "is not held there"
        if self._locks[tier][each]:
            return "is locked"
        if space != "full":
            return None
        if self._children["device" if tier == "device" else "any"][each]:
            return "has more of its prefix behind it"
        if tier == "host" and (each in on_device or self._locks["device"][each]):
            return "is in use on the device"
        return None

    def room(self, tier: str, space: str, *, besides: Container[bytes] = ()) -> int:
        """Units of a space that are free or certainly evictable. besides: pages that have to stay."""
        return self._free(tier, space) + sum(
            each not in besides and self._can_go(tier, space, each) for each in self.held[tier, space]
        )

    def _free(self, tier: str, space: str) -> int:
        name = allocator_of(tier, space)
        free = self._units.get(name, 0) - self.taken[name]
        # A state slot stays for every request that can be opened.
        return free - (self._units.get("rows", 0) - self.taken["rows"] if name == "state" else 0)

    def _can_go(self, tier: str, space: str, each: bytes) -> bool:
        device, host = self._locks["device"][each], self._locks["host"][each]
        if tier == "host" and space != "full":
            return not host
        return not device and not host and (tier == "device" or each not in self.held["device", "full"])

    # Contents

    def parent(self, each: bytes) -> bytes:
        return self._parents.get(each, ROOT)

    def is_backed(self, each: bytes) -> bool:
        return each == ROOT or each in self.held["host", "full"]

    def is_whole_on_host(self, each: bytes) -> bool:
        return each == ROOT or (each in self.held["host", "full"] and each not in self._arriving)

    def is_locked(self, tier: str, each: bytes) -> bool:
        return each == ROOT or self._locks[tier][each] > 0

    def spaces(self, each: bytes) -> set[str]:
        return {space for space in SPACES for tier in ("device", "host") if each in self.held[tier, space]}

    def given_up(self, event: LookedUp) -> tuple[int, dict[str, int]]:
        """For a lookup without host pages: the pages that both tiers serve, and how many the device lacks by space."""
        pages = longest_prefix(self.model, map(self.spaces, event.chain))
        chain, seen = event.chain[:pages], first_seen(self.model, pages)
        lacking = {"full": sum(each not in self.held["device", "full"] for each in chain)}
        if self.model.window:
            window = chain[seen:]
            lacking["window"] = sum(each not in self.held["device", "window"] for each in window)
        if self.model.has_state:
            lacking["state"] = sum(each not in self.held["device", "state"] for each in chain[-1:])
        return pages, lacking

    def fetchable(self, chain: tuple[bytes, ...], whole: dict[str, set[bytes]]) -> tuple[int, int]:
        """Return [start, stop): pages of a prompt that both tiers lack and the store holds whole, with companions;
        empty if the host lacks the page before them. whole: by space, the store's content."""
        on_device = self.held["device", "full"]
        start = next(
            (at for at, each in enumerate(chain) if each not in on_device and not self.is_whole_on_host(each)),
            len(chain),
        )
        if start == len(chain) or (start and not self.is_whole_on_host(chain[start - 1])):
            return start, start
        known = [self.spaces(each) for each in chain[:start]]
        stored = [{space for space in SPACES if each in whole[space]} for each in chain[start:]]
        return start, max(start, longest_prefix(self.model, [*known, *stored]))


def allocator_of(tier: str, space: str) -> str:
    return space if tier == "device" else f"host.{space}"
