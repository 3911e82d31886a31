"""What every page store promises, as functions of a fresh, empty store."""

from __future__ import annotations

import pytest

from kvcheck.core.base.errors import StorageError, UsageError
from kvcheck.core.cache.hicache.storage import Namespace, PageStore

OWNER = Namespace(model="m", dtype="bfloat16", layout="page_first", page_size=16, rank=0, ranks=2)
KEYS = tuple(OWNER.key("full", bytes([number]) * 32) for number in range(24))
BAD_KEYS = (
    "",
    "..",
    "../../etc/passwd",
    "a" * 63,
    "a" * 65,
    "A" * 64,
    "g" * 64,
    "a" * 64 + "\n",
    "a" * 32 + "/" + "b" * 31,
)

PATTERN = bytes(range(251))


def payload_of(number: int, size: int = 3000) -> bytes:
    """Bytes that differ between numbers at every position."""
    start = number * 31 % len(PATTERN)
    return (PATTERN * (size // len(PATTERN) + 2))[start : start + size]


def gives_back_the_exact_bytes(store: PageStore) -> None:
    for number, size in enumerate((0, 1, 4096, 70_001)):
        store.put(KEYS[number], payload_of(number, size))
    for number, size in enumerate((0, 1, 4096, 70_001)):
        assert store.get(KEYS[number], size) == payload_of(number, size)
        assert store.contains(KEYS[number])
    assert store.refused == 0


def absent_is_none_and_not_refused(store: PageStore) -> None:
    store.put(KEYS[0], payload_of(0))
    assert store.get(KEYS[1], 3000) is None
    assert not store.contains(KEYS[1])
    assert store.refused == 0


def another_size_is_refused(store: PageStore) -> None:
    store.put(KEYS[0], payload_of(0))
    assert [store.get(KEYS[0], size) for size in (0, 2999, 3001)] == [None] * 3
    assert store.refused == 3
    assert store.get(KEYS[0], 3000) == payload_of(0)


def equal_bytes_stay_and_other_bytes_replace(store: PageStore) -> None:
    for number in (0, 0, 1):
        store.put(KEYS[0], payload_of(number))
        assert store.get(KEYS[0], 3000) == payload_of(number)
    store.put(KEYS[0], payload_of(2, 500))
    assert store.get(KEYS[0], 500) == payload_of(2, 500)
    assert store.refused == 0


def removed_is_absent(store: PageStore) -> None:
    store.put(KEYS[0], payload_of(0))
    store.put(KEYS[1], payload_of(1))
    store.remove(KEYS[0])
    store.remove(KEYS[0])
    store.remove(KEYS[2])
    assert [store.contains(key) for key in KEYS[:3]] == [False, True, False]
    assert store.get(KEYS[0], 3000) is None
    assert store.get(KEYS[1], 3000) == payload_of(1)
    store.put(KEYS[0], payload_of(3))
    assert store.get(KEYS[0], 3000) == payload_of(3)


def a_key_from_outside_is_no_path(store: PageStore) -> None:
    for key in BAD_KEYS:
        for call in (
            lambda key=key: store.put(key, b"x"),
            lambda key=key: store.get(key, 1),
            lambda key=key: store.contains(key),
            lambda key=key: store.remove(key),
        ):
            with pytest.raises(UsageError, match="not a key"):
                call()


def closed_is_told(store: PageStore) -> None:
    store.put(KEYS[0], payload_of(0))
    store.close()
    store.close()
    for call in (
        lambda: store.put(KEYS[0], payload_of(0)),
        lambda: store.get(KEYS[0], 3000),
        lambda: store.contains(KEYS[0]),
        lambda: store.remove(KEYS[0]),
    ):
        with pytest.raises(StorageError, match="closed"):
            call()


CONTRACT = (
    gives_back_the_exact_bytes,
    absent_is_none_and_not_refused,
    another_size_is_refused,
    equal_bytes_stay_and_other_bytes_replace,
    removed_is_absent,
    a_key_from_outside_is_no_path,
    closed_is_told,
)
