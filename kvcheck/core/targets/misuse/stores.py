"""Misuse of page stores, of the namespaces that keys are made from, and of what is asked of a prefix.

Invariants:
- No read is asked of an engine's own store: a store that damages what is read would count it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial

from kvcheck.core.base.errors import LengthMismatch, StorageError, UsageError
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import (
    HASH_BYTES,
    Namespace,
    PageStore,
    complete_prefix,
    object_bytes,
    pack_object,
    unpack_object,
)
from kvcheck.core.cache.hicache.storage import STORES as page_stores
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each

KEY = "0a" * HASH_BYTES
OTHER = "0b" * HASH_BYTES
WRONG_KEYS = {
    "one digit too short": KEY[1:],
    "one digit too long": KEY + "0",
    "in upper case": KEY.upper(),
    "with a new line": KEY + "\n",
    "that is a path": "../" + KEY[3:],
    "that is empty": "",
}
BYTES = b"0123456789abcdef"


class Stores:
    """Stores in memory: one with an object and no room for another byte, and one that is closed. Each is made when it
    is first asked for."""

    @cached_property
    def full(self) -> MemoryStore:
        """It has room for the object that it keeps."""
        store = MemoryStore(object_bytes(KEY, len(BYTES)))
        store.put(KEY, BYTES)
        return store

    @cached_property
    def closed(self) -> MemoryStore:
        """It had no object."""
        store = MemoryStore()
        store.close()
        return store

    def kept(self) -> object:
        """What no refused call may change."""
        return self.full.keys(), self.full.refused, self.full.contains(KEY)


CALLS: dict[str, Callable[[PageStore, str], object]] = {
    "put": lambda store, key: store.put(key, BYTES),
    "get": lambda store, key: store.get(key, len(BYTES)),
    "contains": lambda store, key: store.contains(key),
    "remove": lambda store, key: store.remove(key),
}


def _keyed(call: str, key: str) -> Callable[[Stores], object]:
    return lambda stores: CALLS[call](stores.full, WRONG_KEYS[key])


def _closed(call: str) -> Callable[[Stores], object]:
    return lambda stores: CALLS[call](stores.closed, KEY)


def _still_there(stores: Stores) -> bool:
    """Bytes of another length are not taken for those under the key, which is counted; the right ones are."""
    wrong = [stores.full.get(KEY, len(BYTES) + more) for more in (-1, 1)]
    refused, stores.full.refused = stores.full.refused, 0
    return (wrong, refused) == ([None, None], 2) and stores.full.get(KEY, len(BYTES)) == BYTES


def _gone(stores: Stores) -> bool:
    """An object that was removed is not there, and leaves its room to another one."""
    stores.full.remove(KEY)
    given = stores.full.contains(KEY), stores.full.get(KEY, len(BYTES)), stores.full.keys()
    stores.full.put(KEY, BYTES)
    return given == (False, None, ()) and stores.full.refused == 0


def _put_again(stores: Stores) -> bool:
    """Equal bytes, and other bytes of the same length, fit into a full store."""
    for payload in (BYTES, BYTES[::-1], BYTES):
        stores.full.put(KEY, payload)
    return stores.full.get(KEY, len(BYTES)) == BYTES


def _refused_object(change: Callable[[bytes], bytes], *, key: str = KEY, more: int = 0) -> Callable[[Stores], object]:
    """An object that was changed gives nothing."""
    return lambda stores: unpack_object(change(pack_object(KEY, BYTES)), key=key, size=len(BYTES) + more) is None


def _owner(**changes: object) -> Callable[[Stores], object]:
    """The last of two ranks, with some changes; nothing of it is made before it is asked for."""
    given = {"model": "m", "dtype": "d", "layout": "l", "page_size": 1, "rank": 1, "ranks": 2} | changes
    return lambda stores: len(Namespace(**given).key("full", b"")) == len(KEY)  # type: ignore[arg-type]


def _prefix(has: dict[str, list[bool]], policy: dict[str, str], **windows: int) -> Callable[[Stores], object]:
    return lambda stores: complete_prefix(has, policy=policy, window_pages=windows) == 2


TWO = [True, True]
STORES: tuple[Misuse[Stores], ...] = (
    *(Misuse(f"{call} with a key {key}", UsageError, _keyed(call, key)) for call in CALLS for key in WRONG_KEYS),
    *(Misuse(f"{call} in a store that is closed", StorageError, _closed(call)) for call in CALLS),
    Misuse("a store in memory, by its name", None, lambda stores: page_stores.load("memory") is MemoryStore),
    Misuse("a store in files, by its name", None, lambda stores: page_stores.load("files") is FileStore),
    Misuse("put into a store without room", StorageError, lambda stores: stores.full.put(OTHER, b"")),
    Misuse(
        "put of one byte more than there is room for", StorageError, lambda stores: stores.full.put(KEY, BYTES + b"0")
    ),
    Misuse("put of bytes that there is just room for", None, _put_again),
    Misuse("get of bytes of another length", None, _still_there),
    Misuse("get of an object that was removed", None, _gone),
    Misuse("damage to an object that is not there", UsageError, lambda stores: stores.full.corrupt(OTHER, at=0)),
    Misuse("an object that lacks its last byte", None, _refused_object(lambda data: data[:-1])),
    Misuse("an object with a byte more", None, _refused_object(lambda data: data + b"0")),
    Misuse("an object with another last byte", None, _refused_object(lambda data: data[:-1] + b"\0")),
    Misuse(
        "an object with another checksum",
        None,
        _refused_object(
            lambda data: (
                data[: -len(BYTES) - 1] + b"\0" + BYTES
                if data[-len(BYTES) - 1]
                else data[: -len(BYTES) - 1] + b"\1" + BYTES
            )
        ),
    ),
    Misuse("an object under another key", None, _refused_object(lambda data: data, key=OTHER)),
    Misuse("an object of another magic", None, _refused_object(lambda data: b"0" + data[1:])),
    *(Misuse(f"a namespace without {name}", UsageError, _owner(**{name: ""})) for name in ("model", "dtype", "layout")),
    Misuse("a namespace of pages of 0 tokens", UsageError, _owner(page_size=0)),
    Misuse("a namespace of rank -1", UsageError, _owner(rank=-1)),
    Misuse("a namespace of a rank above the last", UsageError, _owner(rank=2)),
    Misuse("a namespace of the first rank", None, _owner(rank=0)),
    Misuse("a namespace of the last rank, with pages of a token", None, _owner()),
    Misuse("a space without its policy", LengthMismatch, _prefix({"a": TWO, "b": TWO}, {"a": "all"})),
    Misuse("a policy without its space", LengthMismatch, _prefix({"a": TWO}, {"a": "all", "b": "all"})),
    Misuse(
        "spaces of one prefix with other counts",
        LengthMismatch,
        _prefix({"a": TWO, "b": TWO[1:]}, {"a": "all", "b": "all"}),
    ),
    Misuse("an unknown policy", UsageError, _prefix({"a": TWO}, {"a": "none"})),
    Misuse("a trailing policy without its window", UsageError, _prefix({"a": TWO}, {"a": "trailing"})),
    Misuse("a trailing policy of no page", UsageError, _prefix({"a": TWO}, {"a": "trailing"}, a=0)),
    Misuse("a trailing policy of one page", None, _prefix({"a": [False, True]}, {"a": "trailing"}, a=1)),
    Misuse("policies that fit", None, _prefix({"a": TWO, "b": [False, True]}, {"a": "all", "b": "end"})),
)


def with_key(call: str, key: str, store: PageStore) -> object:
    """A call with one of the wrong keys."""
    return CALLS[call](store, WRONG_KEYS[key])


def store_attempts() -> list[Attempt]:
    """Of stores of their own."""
    return on_each(STORES, Stores(), Stores.kept)


LIVE: tuple[Misuse[PageStore], ...] = tuple(
    Misuse(f"{call} in the engine's store, with a key {key}", UsageError, partial(with_key, call, key))
    for call, key in (("put", "one digit too short"), ("contains", "that is a path"), ("remove", "in upper case"))
)


def live_attempts(store: PageStore) -> list[Attempt]:
    """Of the engine's own store, but for reads."""
    return on_each(LIVE, store, lambda each: each.refused)
