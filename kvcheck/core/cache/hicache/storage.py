"""Storage: the Protocol of page stores, the keys of pages, and the format of a stored object.

Invariants:
- A key is a hash over length-prefixed fields. Two namespaces, spaces or prefixes share a key only if they are equal.
- Nothing in an object is interpreted before its checksum, which covers the header too, matches.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from kvcheck.core.base.errors import LengthMismatch, UsageError

HASH_BYTES = 32
KEY_TEXT = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")

MAGIC = b"KVCHKOBJ"
VERSION = 1
FIELDS = struct.Struct(">8sHHQ")
"""magic 8 | version 2 | key length 2 | payload length 8; an object goes on with key | checksum 32 | payload"""


class PageStore(Protocol):
    """Objects by key. Every method raises StorageError once the store is closed or gone, UsageError for a bad key."""

    name: str
    refused: int
    """Objects that were found and not served: truncated, corrupt, of another size or another key."""

    def put(self, key: str, payload: bytes) -> None:
        """Store `payload`. A reader gets all of it or, if it is lost, nothing. Raise StorageError if it cannot be
        stored; the old object then stays or is lost."""

    def get(self, key: str, size: int) -> bytes | None:
        """The exact `size` bytes stored under `key`. None: absent, or refused."""

    def contains(self, key: str) -> bool:
        """A hint. Only a `get` proves that an object can be read, so do not skip a `put` for this."""

    def remove(self, key: str) -> None: ...

    def close(self) -> None:
        """Close the store; its objects stay. A second call does nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    model: str
    dtype: str
    layout: str
    page_size: int
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        if not (self.model and self.dtype and self.layout):
            raise UsageError(f"a namespace needs model, dtype and layout; got {self}")
        if self.page_size < 1 or not 0 <= self.rank < self.ranks:
            raise UsageError(f"a namespace needs page_size >= 1 and 0 <= rank < ranks; got {self}")

    def key(self, space: str, chain: bytes) -> str:
        """Key of the page that ends the prefix `chain`: lower-case hex, safe as a file name."""
        texts = (self.model, self.dtype, self.layout, str(self.page_size), str(self.rank), str(self.ranks), space)
        # surrogatepass: a model's name may be a path that is not valid UTF-8, and still has to stay distinct.
        fields = [*(text.encode("utf-8", "surrogatepass") for text in texts), chain]
        return _hash_of(fields, purpose=b"kvcheck-key").hex()


def chain_hashes(pages: Sequence[bytes], before: bytes = b"") -> tuple[bytes, ...]:
    """One hash a page, covering all pages before it. before: the hash before the first page."""
    hashes: list[bytes] = []
    for page in pages:
        before = _next_hash(before, page)
        hashes.append(before)
    return tuple(hashes)


@lru_cache(maxsize=1 << 14)
def _next_hash(before: bytes, page: bytes) -> bytes:
    return _hash_of((before, page), purpose=b"kvcheck-chain")


def check_key(key: str) -> None:
    """Raise UsageError unless `key` has the form of `Namespace.key`."""
    if not KEY_TEXT.fullmatch(key):
        raise UsageError(f"not a key of a page store: {key!r:.80}; expected {2 * HASH_BYTES} lower-case hex digits")


def object_bytes(key: str, size: int) -> int:
    return FIELDS.size + len(key) + HASH_BYTES + size


def pack_object(key: str, payload: bytes) -> bytes:
    header = FIELDS.pack(MAGIC, VERSION, len(key), len(payload)) + key.encode("ascii")
    return b"".join((header, _checksum(header, payload), payload))


def unpack_object(data: bytes, *, key: str, size: int) -> bytes | None:
    """The payload, or None unless `data` is, to the last byte, an object of `size` bytes under `key`."""
    header = FIELDS.pack(MAGIC, VERSION, len(key), size) + key.encode("ascii")
    if len(data) != object_bytes(key, size) or not data.startswith(header):
        return None
    start = len(header) + HASH_BYTES
    payload = data[start:]
    return payload if data[len(header) : start] == _checksum(header, payload) else None


def complete_prefix(
    has: Mapping[str, Sequence[bool]],
    *,
    policy: Mapping[str, str],
    window_pages: Mapping[str, int] | None = None,
) -> int:
    """Length in pages of the longest prefix for which every space has the pages it needs.

    has: by space, the presence of each page. policy: need of a prefix of n pages: "all" pages; "trailing" the last
    `window_pages[space]` pages, or all if fewer; "end" page n - 1.
    """
    windows = window_pages or {}
    _check_policies(has, policy=policy, windows=windows)
    total = len(next(iter(has.values()), ()))
    runs = dict.fromkeys(has, 0)  # pages in a row that end here
    longest = 0
    for count in range(1, total + 1):
        for space, pages in has.items():
            runs[space] = runs[space] + 1 if pages[count - 1] else 0
        needed = {"all": count, "end": 1}
        if all(
            runs[space] >= (min(count, windows[space]) if rule == "trailing" else needed[rule])
            for space, rule in policy.items()
        ):
            longest = count
    return longest


def _check_policies(
    has: Mapping[str, Sequence[bool]], *, policy: Mapping[str, str], windows: Mapping[str, int]
) -> None:
    if has.keys() != policy.keys():
        raise LengthMismatch(f"every space needs its policy: pages of {sorted(has)}, policies of {sorted(policy)}")
    if len({len(pages) for pages in has.values()}) > 1:
        counts = {space: len(pages) for space, pages in has.items()}
        raise LengthMismatch(f"spaces of one prefix must have equally many pages; got {counts}")
    for space, rule in policy.items():
        if rule not in ("all", "trailing", "end"):
            raise UsageError(f"space {space}: unknown policy {rule!r}; known: all, trailing, end")
        if rule == "trailing" and windows.get(space, 0) < 1:
            raise UsageError(f"space {space}: policy trailing needs window_pages >= 1; got {windows.get(space)}")


def _hash_of(fields: Sequence[bytes], *, purpose: bytes) -> bytes:
    digest = blake2b(digest_size=HASH_BYTES, person=purpose)
    for field in fields:
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.digest()


def _checksum(header: bytes, payload: bytes) -> bytes:
    return _hash_of((header, payload), purpose=b"kvcheck-object")
