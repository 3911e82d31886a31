"""Literal histories of a prefix cache, written as steps: "hosted; computes ab; backs_up ab; evicts device a|b".

A step is a verb of VERBS with its words. Pages are letters, each behind those before it: in a|b the page b is meant,
and a lies before it. A page has one id, on either tier and in every space, and is allocated while a tier holds it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcheck.core.cache import events as cache_events
from kvcheck.core.cache.backend import backend
from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.workload import events

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
    return tuple(text[: at + 1].encode() for at in range(len(text)))


def prompt(text: str) -> tuple[bytes, ...]:
    return chain(text.replace("|", ""))


def hash_id(each: bytes) -> int:
    return int.from_bytes(each[-3:], "big") % 10007


def name_of(tier: str, space: str) -> str:
    return space if tier == "device" else f"host.{space}"


def touched(space: str, *units: int) -> tuple[Footprint, ...]:
    return (Footprint(space, ("k",), (0, 1), np.array(units, dtype=np.int64)),)


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
    return events.Declared(uses, orders, tuple(units), *((PERIOD, ENGINES) if looks else ()))


def gains(tier: str, text: str, space: str = "full", *, ids: str = "") -> Events:
    units = _ids(text, ids)
    return (
        cache_events.Allocated(name_of(tier, space), units, 1),
        cache_events.TierChanged(tier, space, pages_of(text), units, True),
    )


def loses(tier: str, text: str, space: str = "full", *, ids: str = "") -> Events:
    units = _ids(text, ids)
    return (
        cache_events.TierChanged(tier, space, pages_of(text), units, False),
        cache_events.Freed(name_of(tier, space), units),
    )


def _ids(text: str, ids: str) -> tuple[int, ...]:
    return tuple(map(int, str(ids).split(","))) if ids else tuple(map(hash_id, pages_of(text)))


def computes(*texts: str, priority: int = 0) -> Events:
    """A request offers each prompt, of which these pages are new on the device."""
    return tuple(event for text in texts for event in (offers(text, priority=priority), *gains("device", text)))


def offers(text: str, *, priority: int = 0) -> Event:
    return cache_events.Computed(7, prompt(text), priority)


def serves(*texts: str) -> Events:
    """Each prompt is computed and backed up."""
    return tuple(event for text in texts for event in (*computes(text), *backs_up(text)))


def hosts(text: str) -> Events:
    """The host alone gets the pages of a prompt that the store was asked for."""
    return (cache_events.StoreQueried(99, prompt(text), False), *gains("host", text))


def backs_up(text: str) -> Events:
    return (*gains("host", text), acked("backup", len(pages_of(text)), text))


def evicts(tier: str, text: str, space: str = "full", *, passed: str = "") -> Events:
    """A choice, and what follows from it. passed: the end of a run that could not go."""
    return (chooses(tier, text, space, passed=passed), *loses(tier, text, space))


def chooses(tier: str, text: str, space: str = "full", *, passed: str = "") -> Event:
    return cache_events.Chosen(tier, space, pages_of(text), (passed.encode(),) if passed else ())


def finds(text: str, pages: int, only: str = "", *, request: int = 7, priority: int = 0, device: int = -1) -> Event:
    """only: "device" where the host's pages could not be loaded. device: of the pages, as many are there."""
    found = () if text == "-" else chain(text)
    return cache_events.LookedUp(request, found, pages, pages if device < 0 else device, only == "device", priority)


def later(uses: int) -> Events:
    """So many uses of the cache by prompts that it knows nothing of."""
    return tuple(cache_events.LookedUp(99, (b"?",), 0, 0, False) for _ in range(uses))


def vain(count: int) -> Events:
    """So many fetches that bring nothing."""
    return (cache_events.StoreQueried(7, chain("abc"), True), acked("prefetch", 0)) * count


def acked(kind: str, pages: int, text: str = "", *, number: int = 0) -> Event:
    return events.Transferred(kind, 7, pages, True, pages_of(text), number)


def runs(kind: str, number: int, *, at: int = 0, lane: str = "load.0") -> Event:
    """One operation of a copy; its ordinal is the copy's number, if it has no other."""
    device, host = touched("full", 50), touched("host.full", number)
    reads, writes = (device, host) if kind == "backup" else (host, device)
    return backend.Submitted(at or number, "copy", lane, reads, writes)


def stored(is_whole: bool) -> Callable[..., Event]:
    return lambda text, space="full", *, keys="": cache_events.Stored(space, pages_of(text), is_whole, tuple(keys))


def asked(is_fetching: bool) -> Callable[..., Event]:
    return lambda text, *, request=7: cache_events.StoreQueried(request, chain(text), is_fetching)


def started(kind: str, lane: str = "load.0") -> Callable[..., Events]:
    """A copy of the host page of that number, as one operation."""
    return lambda number, lane=lane: (
        events.Moving(number, kind, (("full", (number,)),)),
        runs(kind, number, lane=lane),
    )


VERBS: dict[str, Callable[..., Event | Events]] = {
    "model": lambda size, kind="", *, window=0: events.Modelled(size, window, kind == "states"),
    **{"rules": rules, "hosted": lambda: rules(host=9), "looking": lambda: rules(host=9, looks=1)},
    # Pages of the tiers
    **{each.__name__: each for each in (gains, loses, computes, offers, serves, hosts, backs_up, evicts, chooses)},
    **{"finds": finds, "later": later},
    "locks": lambda tier, text: cache_events.Locked(tier, text.encode(), True),
    "unlocks": lambda tier, text: cache_events.Locked(tier, text.encode(), False),
    "wants": lambda tier, units: cache_events.RoomWanted(tier, "full", units),
    "refuses": lambda kind, text, space="full": cache_events.Refused(kind, 7, space, pages_of(text)),
    "flushes": lambda tiers, text: cache_events.Flushed(tuple(tiers.split("+")), pages_of(text)),
    "answers": lambda tiers, text, how: events.Answered(tuple(tiers.split("+")), pages_of(text), how == "gone"),
    "allocates": lambda space, count: cache_events.Allocated(space, tuple(range(count)), 1),
    "counted": lambda free, cached: events.Counted("full", free, cached, 9),
    # Requests
    "sent": lambda tokens: events.Sent(7, 0, tokens),
    "forward": lambda start, stop: events.Forward(7, start, stop),
    "ended": lambda: events.Finished(7, (1,)),
    "aborted": lambda: events.Aborted(7),
    "rounds": lambda count: (events.Reported(end=""),) * count,
    # The store: it keeps all, takes pages, could not serve them whole, and what happens to its objects
    **{"keeps": events.StoreKeeps, "stores": stored(True), "misses": stored(False)},
    **{"queries": asked(False), "fetches": asked(True), "vain": vain},
    **{"damaged": events.Damaged, "deleted": lambda text: events.Deleted("full", pages_of(text))},
    "gets": lambda number: backend.Submitted(number, "get", "s", (), touched("host.full", number), request=7),
    "puts": lambda text: backend.Submitted(5, "put", "store", touched("host.full", *map(hash_id, chain(text))), ()),
    # Copies
    **{"acked": acked, "runs": runs, "done": backend.Completed, "backup": started("backup"), "load": started("load")},
    "waits": lambda kind, number: events.Moving(number, kind, (("full", (number,)),)),  # it has no operation yet
    "copied": lambda number: acked("backup", 1, number=number),
    "loaded": lambda number: acked("load", 1, number=number),
    "loads": lambda number, lane="load.0": history(f"load {number} {lane}; done {number}; loaded {number}"),
    "changes": lambda kind: events.Transferred(kind, 7, 2, False),  # its index values
}
