"""MemoryStore: a page store of whole objects in a dict, for the simulator, with faults on request."""

from __future__ import annotations

from kvcheck.core.base.errors import StorageError, UsageError
from kvcheck.core.cache.hicache.storage import check_key, pack_object, unpack_object


class MemoryStore:
    name = "memory"

    def __init__(self) -> None:
        self.refused = 0
        self._objects: dict[str, bytes] = {}
        self._is_closed = False

    def put(self, key: str, payload: bytes) -> None:
        self._check(key)
        self._objects[key] = pack_object(key, payload)

    def get(self, key: str, size: int) -> bytes | None:
        self._check(key)
        data = self._objects.get(key)
        if data is None:
            return None
        payload = unpack_object(data, key=key, size=size)
        self.refused += payload is None
        return payload

    def contains(self, key: str) -> bool:
        self._check(key)
        return key in self._objects

    def remove(self, key: str) -> None:
        self._check(key)
        self._objects.pop(key, None)

    def close(self) -> None:
        self._is_closed = True

    def keys(self) -> tuple[str, ...]:
        return tuple(self._objects)

    def corrupt(self, key: str, *, at: int) -> None:
        data = bytearray(self._object(key))
        data[at] ^= 0xFF
        self._objects[key] = bytes(data)

    def truncate(self, key: str, *, size: int) -> None:
        self._objects[key] = self._object(key)[:size]

    def drop(self, key: str) -> None:
        del self._objects[key]

    def _object(self, key: str) -> bytes:
        if key not in self._objects:
            raise UsageError(f"memory store has no object {key!r} to damage; it has {len(self._objects)} objects")
        return self._objects[key]

    def _check(self, key: str) -> None:
        check_key(key)
        if self._is_closed:
            raise StorageError("memory store is closed")
