"""Keys collide for equal owners only, an object is read whole or not at all, and a prefix is restorable or shorter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.store_contract import CONTRACT, KEYS, OWNER

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.hicache.file_store import FileStore
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.storage import (
    FIELDS,
    HASH_BYTES,
    KEY_TEXT,
    MAGIC,
    VERSION,
    Namespace,
    PageStore,
    _checksum,
    chain_hashes,
    complete_prefix,
    object_bytes,
    pack_object,
    unpack_object,
)

BLOBS = st.binary(max_size=6)


@pytest.mark.parametrize("promise", CONTRACT)
@pytest.mark.parametrize("name", ["files", "memory"])
def test_contract(name: str, promise: Callable[[PageStore], None], tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store") if name == "files" else MemoryStore()
    assert store.name == name
    promise(store)
    store.close()


def owner(**change: object) -> Namespace:
    return dataclasses.replace(OWNER, **change)  # type: ignore[arg-type]


def key_of(space: str = "s", chain: bytes = b"x", **change: object) -> str:
    return owner(**change).key(space, chain)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (key_of(model="ab", dtype="c"), key_of(model="a", dtype="bc")),
        (key_of(page_size=1, rank=1, ranks=11), key_of(page_size=11, rank=1, ranks=11)),
        (key_of(page_size=16, rank=1, ranks=12), key_of(page_size=161, rank=1, ranks=2)),
        (key_of(layout="l", page_size=1, ranks=4), key_of(layout="l1", page_size=14)),
        (key_of("ab", b"c"), key_of("a", b"bc")),
        (key_of("s", b"2"), key_of("s", b"", ranks=22)),
        (key_of(model="a\0b"), key_of(model="a")),
        (key_of(model="\udc80"), key_of(model="\udc81")),
        *(
            (key_of(), key_of(**{name: value + "x" if isinstance(value, str) else value + 1}))
            for name, value in dataclasses.asdict(OWNER).items()
        ),
    ],
)
def test_fields_that_concatenate_alike_and_every_field_stay_apart(first: str, second: str) -> None:
    assert first != second
    assert KEY_TEXT.fullmatch(first) and KEY_TEXT.fullmatch(second)


def test_keys_and_objects_do_not_drift() -> None:
    """Stores outlive versions: if this fails on purpose, VERSION and the hash's purpose change with it."""
    assert OWNER.key("full", b"\1" * 32) == "80fa5294375c3844316d4d01d3b63e541d333e0165a3c1de252462f8a3acf1a4"
    assert pack_object(KEYS[0], b"abc")[: FIELDS.size] == b"KVCHKOBJ\0\1\0\x40\0\0\0\0\0\0\0\3"
    assert (
        pack_object(KEYS[0], b"abc")[FIELDS.size + 64 : -3].hex()
        == "1782cc5dba600649f7fa74a9d0137a8600c2d81e1dd9c3b26fb178d6514f42e1"
    )


@pytest.mark.parametrize(
    "wrong", [{"model": ""}, {"dtype": ""}, {"page_size": 0}, {"rank": 2}, {"rank": -1}, {"layout": ""}]
)
def test_a_namespace_of_nobody_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="a namespace needs"):
        owner(**wrong)


@given(pages=st.lists(BLOBS, max_size=6), cut=st.integers(0, 6))
def test_a_chain_can_be_continued(pages: list[bytes], cut: int) -> None:
    whole = chain_hashes(pages)
    head = chain_hashes(pages[:cut])
    assert head == whole[:cut]
    assert whole == head + chain_hashes(pages[cut:], before=head[-1] if head else b"")
    assert len(set(whole)) == len(whole) == len(pages)


@given(one=st.lists(BLOBS, max_size=4), other=st.lists(BLOBS, max_size=4))
def test_a_chain_covers_all_pages_before(one: list[bytes], other: list[bytes]) -> None:
    for end in range(1, min(len(one), len(other)) + 1):
        assert (chain_hashes(one)[end - 1] == chain_hashes(other)[end - 1]) == (one[:end] == other[:end])


@given(payload=st.binary(max_size=40), mask=st.integers(1, 255))
def test_every_flipped_byte_is_refused(payload: bytes, mask: int) -> None:
    data = pack_object(KEYS[0], payload)
    assert unpack_object(data, key=KEYS[0], size=len(payload)) == payload
    for at in range(len(data)):
        flipped = data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :]
        assert unpack_object(flipped, key=KEYS[0], size=len(payload)) is None, at


@given(payload=st.binary(max_size=40), extra=st.binary(min_size=1, max_size=5))
def test_every_truncation_and_every_tail_is_refused(payload: bytes, extra: bytes) -> None:
    data = pack_object(KEYS[0], payload)
    assert len(data) == object_bytes(KEYS[0], len(payload))
    for size in (len(payload), max(0, len(payload) - 1), 0):
        for length in range(len(data)):
            assert unpack_object(data[:length], key=KEYS[0], size=size) is None
        assert unpack_object(data + extra, key=KEYS[0], size=size) is None
    assert unpack_object(data + extra, key=KEYS[0], size=len(payload) + len(extra)) is None


def test_another_version_is_refused_though_its_checksum_matches_and_so_is_another_key() -> None:
    header = FIELDS.pack(MAGIC, VERSION + 1, 64, 3) + KEYS[0].encode()
    later = header + _checksum(header, b"abc") + b"abc"
    assert len(later) == object_bytes(KEYS[0], 3) and len(_checksum(header, b"abc")) == HASH_BYTES
    assert unpack_object(later, key=KEYS[0], size=3) is None
    assert unpack_object(pack_object(KEYS[0], b"abc"), key=KEYS[1], size=3) is None


def restorable(count: int, pages: Sequence[bool], rule: str, window: int) -> bool:
    """The definition: which pages a prefix of `count` needs, named one by one."""
    needed = {"all": range(count), "trailing": range(max(0, count - window), count), "end": range(count - 1, count)}
    return all(pages[page] for page in needed[rule])


@st.composite
def restores(draw: st.DrawFn) -> tuple[dict[str, list[bool]], dict[str, str], dict[str, int]]:
    total = draw(st.integers(0, 12))
    spaces = [f"s{number}" for number in range(draw(st.integers(1, 4)))]
    mostly = st.sampled_from([True, True, True, False])
    has = {space: draw(st.lists(mostly, min_size=total, max_size=total)) for space in spaces}
    policy = {space: draw(st.sampled_from(["all", "trailing", "end"])) for space in spaces}
    return has, policy, {space: draw(st.integers(1, 5)) for space in spaces}


@given(restores())
def test_the_restorable_prefix_is_the_longest_by_definition(
    case: tuple[dict[str, list[bool]], dict[str, str], dict[str, int]],
) -> None:
    has, policy, windows = case
    total = len(next(iter(has.values())))
    expected = max(
        count
        for count in range(total + 1)
        if count == 0 or all(restorable(count, has[space], policy[space], windows[space]) for space in has)
    )
    assert complete_prefix(has, policy=policy, window_pages=windows) == expected
