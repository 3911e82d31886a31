"""Literal histories of a prefix cache, written as steps: "rules host=9; computes ab; backs_up ab; evicts device a|b".

A step is a verb of VERBS with its words. Pages are letters, each behind those before it: in a|b the page b is meant,
and a lies before it. A page has one id, on either tier and in every space, and is allocated while a tier holds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
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
    Stored,
    StoreQueried,
    TierChanged,
)
from kvcheck.core.stress.workload.events import (
    Aborted,
    Answered,
    Counted,
    Damaged,
    Declared,
    Deleted,
    Event,
    Finished,
    Forward,
    Modelled,
    Moving,
    Reported,
    Sent,
    StoreKeeps,
    Transferred,
)

Events = tuple[Event, ...]
ENGINES = (("load.0", "load.0.side"), ("load.1", "load.1.side"))
PERIOD = 3


def history(text: str) -> Events:
    return tuple(event for step in text.split(";") for event in _step(*step.split()))


def _step(verb: str, *words: str) -> Events:
    given = [_value(word) for word in words if "=" not in word]
    named = {key: _value(word) for key, _, word in (each.partition("=") for each in words) if word}
    made = VERBS[verb](*given, **named)
    return made if isinstance(made, tuple) else (made,)


def _value(word: str) -> int | str | None:
    return int(word) if word.isdigit() else None if word == "None" else word


def pages_of(text: str) -> tuple[bytes, ...]:
    """The hashes of the pages that are meant: each says what lies before it."""
    before, bar, _ = text.partition("|")
    return chain(text.replace("|", ""))[len(before) if bar else 0 :]


def chain(text: str) -> tuple[bytes, ...]:
    """A hash for each letter, which says what lies before it."""
    return tuple(text[: at + 1].encode() for at in range(len(text)))


def prompt(text: str) -> tuple[bytes, ...]:
    return chain(text.replace("|", ""))


def hash_id(each: bytes) -> int:
    return int.from_bytes(each[-3:], "big") % 10007


def name_of(tier: str, space: str) -> str:
    return space if tier == "device" else f"host.{space}"


def touched(space: str, *units: int) -> tuple[Footprint, ...]:
    return (Footprint(space, ("k",), (0, 1), np.array(units, dtype=np.int64)),)


# What is declared


def model(size: int, kind: str = "", *, window: int = 0) -> Event:
    return Modelled(page_size=size, window=window, has_state=kind == "states")


def rules(
    order: str | None = "lru",
    *,
    uses: int | None = 1,
    device: int = 9,
    host: int = 0,
    window: int = 0,
    state: int = 0,
    rows: int = 0,
    looks: int = 0,
) -> Event:
    """A cache of so many pages on each tier; without host pages it has no host tier. looks: each PERIOD rounds."""
    units = [("full", device), *([("window", window)] if window else [])]
    units += [("state", state), ("rows", rows)] if state else []
    units += [("host.full", host), ("host.window", host), ("host.state", host)] if host else []
    orders = (("device", order), ("host", order)) if order else ()
    return Declared(uses, orders, tuple(units), *((PERIOD, ENGINES) if looks else ()))


# Pages of the tiers


def gains(tier: str, text: str, space: str = "full", *, ids: str = "") -> Events:
    units = _ids(text, ids)
    return (Allocated(name_of(tier, space), units, 1), TierChanged(tier, space, pages_of(text), units, True))


def loses(tier: str, text: str, space: str = "full", *, ids: str = "") -> Events:
    units = _ids(text, ids)
    return (TierChanged(tier, space, pages_of(text), units, False), Freed(name_of(tier, space), units))


def _ids(text: str, ids: str) -> tuple[int, ...]:
    return tuple(map(int, str(ids).split(","))) if ids else tuple(map(hash_id, pages_of(text)))


def computes(*texts: str, priority: int = 0) -> Events:
    """A request offers each prompt, of which these pages are new on the device."""
    return tuple(event for text in texts for event in (offers(text, priority=priority), *gains("device", text)))


def offers(text: str, *, priority: int = 0) -> Event:
    return Computed(7, prompt(text), priority)


def serves(*texts: str) -> Events:
    """Each prompt is computed and backed up."""
    return tuple(event for text in texts for event in (*computes(text), *backs_up(text)))


def hosts(text: str) -> Events:
    """The host alone gets the pages of a prompt that the store was asked for."""
    return (StoreQueried(99, prompt(text), False), *gains("host", text))


def backs_up(text: str) -> Events:
    return (*gains("host", text), acked("backup", len(pages_of(text)), text))


def evicts(tier: str, text: str, space: str = "full", *, passed: str = "") -> Events:
    """A choice, and what follows from it. passed: the end of a run that could not go."""
    return (chooses(tier, text, space, passed=passed), *loses(tier, text, space))


def chooses(tier: str, text: str, space: str = "full", *, passed: str = "") -> Event:
    return Chosen(tier, space, pages_of(text), (passed.encode(),) if passed else ())


def finds(text: str, pages: int, only: str = "", *, request: int = 7, priority: int = 0, device: int = -1) -> Event:
    """only: "device" where the host's pages could not be loaded. device: of the pages, as many are there."""
    found = () if text == "-" else chain(text)
    return LookedUp(request, found, pages, pages if device < 0 else device, only == "device", priority)


def later(uses: int) -> Events:
    """So many uses of the cache by prompts that it knows nothing of."""
    return tuple(LookedUp(99, (b"?",), 0, 0, False) for _ in range(uses))


def refuses(kind: str, text: str, space: str = "full") -> Event:
    return Refused(kind, 7, space, pages_of(text))


def locks(tier: str, text: str) -> Event:
    return Locked(tier, text.encode(), True)


def unlocks(tier: str, text: str) -> Event:
    return Locked(tier, text.encode(), False)


def flushes(tiers: str, text: str) -> Event:
    return Flushed(tuple(tiers.split("+")), pages_of(text))


def answers(tiers: str, text: str, how: str) -> Event:
    return Answered(tuple(tiers.split("+")), pages_of(text), how == "gone")


# The store


def stores(text: str, space: str = "full", *, keys: str = "") -> Event:
    return Stored(space, pages_of(text), True, tuple(keys))


def misses(text: str, space: str = "full", *, key: str = "") -> Event:
    """The store could not serve it whole."""
    return Stored(space, pages_of(text), False, tuple(key))


def queries(text: str, *, request: int = 7) -> Event:
    return StoreQueried(request, chain(text), False)


def fetches(text: str) -> Event:
    return StoreQueried(7, chain(text), True)


def vain(count: int) -> Events:
    """So many fetches that bring nothing."""
    return (fetches("abc"), acked("prefetch", 0)) * count


# Copies


def acked(kind: str, pages: int, text: str = "", *, number: int = 0) -> Event:
    return Transferred(kind, 7, pages, True, pages_of(text), number)


def makes(kind: str, number: int) -> Event:
    """A copy of the host page of that number."""
    return Moving(number, kind, (("full", (number,)),))


def runs(kind: str, number: int, *, at: int = 0, lane: str = "load.0") -> Event:
    """One operation of a copy; its ordinal is the copy's number, if it has no other."""
    device, host = touched("full", 50), touched("host.full", number)
    reads, writes = (device, host) if kind == "backup" else (host, device)
    return Submitted(at or number, "copy", lane, reads, writes)


def backup(number: int) -> Events:
    return (makes("backup", number), runs("backup", number))


def load(number: int, lane: str = "load.0") -> Events:
    return (makes("load", number), runs("load", number, lane=lane), Completed(number), loaded(number))


def loaded(number: int) -> Event:
    return acked("load", 1, number=number)


def copied(number: int) -> Event:
    return acked("backup", 1, number=number)


def gets(number: int) -> Event:
    """The store's copy of a host page begins."""
    return Submitted(number, "get", "s", (), touched("host.full", number), request=7)


def puts(text: str) -> Event:
    return Submitted(5, "storage.put", "store", touched("host.full", *map(hash_id, chain(text))), ())


VERBS: dict[str, Callable[..., Event | Events]] = {
    **{each.__name__: each for each in (model, rules, gains, loses, computes, offers, serves, hosts, backs_up)},
    **{each.__name__: each for each in (evicts, chooses, finds, later, refuses, locks, unlocks, flushes, answers)},
    **{each.__name__: each for each in (stores, misses, queries, fetches, vain, acked, makes, runs, backup, load)},
    **{each.__name__: each for each in (loaded, copied, gets, puts)},
    "keeps": StoreKeeps,  # the store loses nothing
    "damaged": Damaged,
    "deleted": lambda text: Deleted("full", pages_of(text)),
    "wants": lambda tier, units: RoomWanted(tier, "full", units),
    "changes": lambda kind: Transferred(kind, 7, 2, False),  # its index values
    "forward": lambda start, stop: Forward(7, start, stop),
    "sent": lambda tokens: Sent(7, 0, tokens),
    "ended": lambda: Finished(7, (1,)),
    "aborted": lambda: Aborted(7),
    "counted": lambda free, cached: Counted("full", free, cached, 9),
    "done": Completed,
    "rounds": lambda count: (Reported(end=""),) * count,
    "allocates": lambda space, count: Allocated(space, tuple(range(count)), 1),
}
