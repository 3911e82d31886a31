"""Literal histories of a prefix cache: what is computed, backed up, found and given up, by texts of one letter a page.

Invariants:
- A page has one id, on either tier and in every space, and is allocated while a tier holds it.
"""

from __future__ import annotations

from kvcheck.core.cache.events import Allocated, Chosen, Computed, Event, Freed, LookedUp, StoreQueried, TierChanged
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles.caching import CachingOracle
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.workload.events import Declared, Transferred

Events = tuple[Event, ...]


def chain(text: str) -> tuple[bytes, ...]:
    """A hash for each letter, which says what lies before it."""
    return tuple(text[: at + 1].encode() for at in range(len(text)))


def rules(
    order: str = "lru", *, uses: int | None = 1, device: int = 9, host: int = 0, state: int = 0, rows: int = 0
) -> Declared:
    """A cache of so many pages on each tier; without host pages it has no host tier."""
    units = [("full", device), *([("state", state), ("rows", rows)] if state else [])]
    units += [("host.full", host), ("host.window", host), ("host.state", host)] if host else []
    return Declared(uses, (("device", order), ("host", order)), tuple(units))


def gains(tier: str, text: str, *, start: int = 0, space: str = "full") -> Events:
    """The pages from `start` on, each under an id of its own; they are allocated as well."""
    added = chain(text)[start:]
    ids = tuple(hash_id(each) for each in added)
    name = space if tier == "device" else f"host.{space}"
    return (Allocated(name, ids, 1), TierChanged(tier, space, added, ids, True))


def hosts(text: str, *, start: int = 0) -> Events:
    """The host alone gets the pages of a prompt that the store was asked for."""
    return (StoreQueried(99, chain(text), False), *gains("host", text, start=start))


def loses(tier: str, text: str, *, start: int = 0, space: str = "full") -> Events:
    added = chain(text)[start:]
    ids = tuple(hash_id(each) for each in added)
    return (TierChanged(tier, space, added, ids, False), Freed(space if tier == "device" else f"host.{space}", ids))


def hash_id(each: bytes) -> int:
    return int.from_bytes(each[-3:], "big") % 10007


def computes(text: str, *, start: int = 0, request: int = 7, priority: int = 0) -> Events:
    """A request offers a prefix, of which the pages from `start` on are new on the device."""
    return (Computed(request, chain(text), priority), *gains("device", text, start=start))


def backs_up(text: str, *, start: int = 0) -> Events:
    return (*gains("host", text, start=start), Transferred("backup", 7, len(text) - start, True, chain(text)[start:]))


def finds(text: str, pages: int, *, request: int = 7, priority: int = 0, device_only: bool = False) -> LookedUp:
    return LookedUp(request, chain(text), pages, pages, device_only, priority)


def evicts(tier: str, text: str, *, start: int = 0, space: str = "full", passed: tuple[bytes, ...] = ()) -> Events:
    """A choice, and what follows from it."""
    return (Chosen(tier, space, chain(text)[start:], passed), *loses(tier, text, start=start, space=space))


def later(uses: int) -> Events:
    """So many uses of the cache by prompts that it knows nothing of."""
    return tuple(finds("?", 0, request=99) for _ in range(uses))


def check_good(events: Events) -> None:
    """The caching oracle has nothing to say of it."""
    assert [each.message for each in judge(CachingOracle(), History.of(*events))] == []


def check_bad(events: Events, code: str, words: tuple[str, ...]) -> None:
    """The caching oracle has one finding of it, with this code and these words."""
    (finding,) = judge(CachingOracle(), History.of(*events))
    assert (finding.code, finding.oracle) == (code, "caching")
    assert all(each in finding.message for each in words), finding.message
