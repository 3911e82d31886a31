"""MooncakeStore: a page store over Mooncake's distributed store.

Invariants:
- A `put` counts once the same bytes were read back, a `get` once the checksum matches. The library returns 0 if a key
  exists with other bytes, which it keeps, and reports objects whose segment is gone.
- Nothing is called after `close`, because the library would end the process.
- A bounded memory evicts, so a stored object can be absent later. It never differs.
"""

from __future__ import annotations

import re
import socket
from typing import Protocol

from kvcheck.core.base.errors import StorageError, UnknownVerdict, UsageError
from kvcheck.core.cache.hicache.storage import check_key, pack_object, unpack_object

ADDRESS = re.compile(r"([\w.-]+):(\d{1,5})")
CONNECT_TIMEOUT_S = 2.0
NO_METADATA_SERVER = "P2PHANDSHAKE"
OK, NOT_FOUND, NO_SPACE = 0, -704, -200


class StoreClient(Protocol):
    def setup(
        self,
        local_hostname: str,
        metadata_server: str,
        global_segment_size: int,
        local_buffer_size: int,
        protocol: str,
        rdma_devices: str,
        master_server_addr: str,
    ) -> int:
        """0, or a negative code."""

    def put(self, key: str, value: bytes) -> int:
        """0 for a new key, and for an existing one, whose bytes stay; else a negative code."""

    def upsert(self, key: str, value: bytes) -> int:
        """Replace: 0, or a negative code."""

    def get(self, key: str) -> bytes:
        """The bytes; b"" on any failure."""

    def is_exist(self, key: str) -> int:
        """1 or 0 as the master reports, or a negative code."""

    def remove(self, key: str, force: bool) -> int:
        """0, or a negative code. force: also while a reader's lease lasts."""

    def close(self) -> int:
        """Leave the cluster. Any later call is undefined."""


class MooncakeStore:
    """Objects in a Mooncake cluster, over TCP. Without the library or a master the constructor raises.

    master: "host:port". segment_bytes: memory lent to the cluster until `close`. buffer_bytes: the largest object.
    host: address for peers.
    """

    name = "mooncake"

    def __init__(
        self, master: str, *, segment_bytes: int = 0, buffer_bytes: int = 16 << 20, host: str = "127.0.0.1"
    ) -> None:
        self.refused = 0
        self.master = master
        self._buffer_bytes = buffer_bytes
        _check_master(master)
        client = _new_client()
        code = client.setup(host, NO_METADATA_SERVER, segment_bytes, buffer_bytes, "tcp", "", master)
        if code != OK:
            raise UnknownVerdict(
                f"store mooncake could not join {master}: setup returned {code}, expected 0; see the master's log"
            )
        self._client: StoreClient | None = client

    def put(self, key: str, payload: bytes) -> None:
        client = self._open(key)
        data = pack_object(key, payload)
        if len(data) > self._buffer_bytes:
            raise StorageError(
                f"store mooncake cannot keep an object of {len(data)} bytes; its buffer holds {self._buffer_bytes}"
            )
        code = client.put(key, data)
        if code == OK and client.get(key) != data:  # the key was there with other bytes
            code = client.upsert(key, data)
            if code == OK and client.get(key) != data:
                raise StorageError(f"store mooncake took {len(data)} bytes and does not give them back; key {key}")
        if code != OK:
            reason = "its segments are full" if code == NO_SPACE else f"the library returned {code}"
            raise StorageError(f"store mooncake could not keep {len(data)} bytes at {self.master}: {reason}")

    def get(self, key: str, size: int) -> bytes | None:
        """Raise StorageError if the master does not answer."""
        client = self._open(key)
        data = client.get(key)
        if not data:
            self._exists(client, key)  # absent and cut off look alike, except here
            return None
        payload = unpack_object(data, key=key, size=size)
        self.refused += payload is None
        return payload

    def contains(self, key: str) -> bool:
        """True if the master reports the object, which it may do for seconds after a segment is gone."""
        return self._exists(self._open(key), key)

    def remove(self, key: str) -> None:
        """Remove `key`, leased or not. Readers get all bytes or bytes that fail the checksum."""
        code = self._open(key).remove(key, True)
        if code not in (OK, NOT_FOUND):
            raise StorageError(f"store mooncake could not remove {key} at {self.master}: the library returned {code}")

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _open(self, key: str) -> StoreClient:
        check_key(key)
        if self._client is None:
            raise StorageError("store mooncake is closed")
        return self._client

    def _exists(self, client: StoreClient, key: str) -> bool:
        code = client.is_exist(key)
        if code < 0:
            raise StorageError(f"store mooncake got no answer from the master at {self.master}: {code}")
        return code == 1


def _check_master(master: str) -> None:
    """Raise unless something listens at `master`: the library would try for a minute and a half."""
    match = ADDRESS.fullmatch(master)
    if match is None or not 0 < int(match[2]) < 1 << 16:
        raise UsageError(f"not an address of a mooncake master: {master!r}; expected host:port")
    try:
        socket.create_connection((match[1], int(match[2])), timeout=CONNECT_TIMEOUT_S).close()
    except OSError as error:
        raise UnknownVerdict(
            f"store mooncake needs a master at {master}; connecting failed: {error}; "
            f"start one: mooncake_master --rpc_port={match[2]}"
        ) from error


def _new_client() -> StoreClient:
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise UnknownVerdict(
            f"store mooncake needs the mooncake transfer engine; importing it failed: {error}; next: "
            "pip install 'mooncake-transfer-engine-non-cuda>=0.3.13.post1'; on Debian also "
            "apt-get install libibverbs1 libnuma1 libcurl4"
        ) from error
    client: StoreClient = MooncakeDistributedStore()
    return client
