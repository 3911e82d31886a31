"""Links: one TCP connection between two ranks, with a thread that takes the peer's frames.

Invariants:
- Listeners use the loopback interface. The key authenticates and does not encrypt.
- A process that has not proved that it has the key gets a nonce and nothing else.
- A silent stranger delays no peer: connections are greeted in parallel, and the oldest is dropped if there are many.
- Every wait has a bound. A peer that reads nothing for SEND_S seconds counts as gone.
- A link that this side has closed delivers the frames that had arrived by then.
- Frames of one link arrive whole and in order. GONE arrives once, after all of them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from enum import IntEnum

from kvcheck.core.base.errors import TransferError

LEASE_S = 15.0
BEATS_OF_A_LEASE = 8
MOST_BEAT_S = 0.5
HEADER = struct.Struct("=BI")
MOST_BYTES = 64 << 20
SEND_S = 20.0
HELLO_S = 60.0
STRANGER_S = 10.0
"""Longest handshake of a new connection; peers finish it at once."""
MOST_GREETINGS = 32
PROOF_BYTES = 1024
"""Longest frame before the proof of the key."""
LOOK_S = 0.05
"""Interval at which a listener checks for new links, or for free descriptors."""
DIGEST_BYTES = 32
LOCAL = "127.0.0.1"


class Pulse:
    """A thread over the links of one rank. lease_s: longest silence of a peer."""

    def __init__(self, links: Sequence[Link], *, lease_s: float) -> None:
        self._links = links
        self._lease_s = lease_s
        self._beat_s = min(MOST_BEAT_S, lease_s / BEATS_OF_A_LEASE)
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        heard = {link.peer: link.heard for link in self._links}
        silent_s = dict.fromkeys(heard, 0.0)
        while links := [link for link in self._links if not link.is_lost]:
            before = time.monotonic()
            time.sleep(self._beat_s)
            passed_s = min(time.monotonic() - before, 2 * self._beat_s)
            for link in links:
                link.beat()
                silent_s[link.peer] = silent_s[link.peer] + passed_s if link.heard == heard[link.peer] else 0.0
                heard[link.peer] = link.heard
                if silent_s[link.peer] >= self._limit_s(link):
                    self._cut_off(link)

    def _limit_s(self, link: Link) -> float:
        """A peer that is still starting has more time."""
        return self._lease_s if link.heard else max(self._lease_s, HELLO_S)

    def _cut_off(self, link: Link) -> None:
        link.close()


class FrameKind(IntEnum):
    """MESSAGE, ENGINE, FENCE: JSON. DATA: bytes for regions. BEAT: empty. GONE: never sent."""

    HELLO = 1
    MESSAGE = 2
    DATA = 3
    ENGINE = 4
    FENCE = 5
    GONE = 6
    BEAT = 7
    PROOF = 8


_KINDS = {int(kind): kind for kind in FrameKind if kind is not FrameKind.GONE}


Handler = Callable[[str, FrameKind, bytearray], None]
"""Called by the link's thread with the peer and a frame of it."""


class LinkLost(Exception):
    """The peer is gone, or sent an invalid frame."""


class Link:
    """A connection after the handshake. heard: reads that returned bytes."""

    def __init__(self, connection: socket.socket, hello: dict[str, object]) -> None:
        self.hello = hello
        self.peer = str(hello["name"])
        self._connection = connection
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_lost = False
        self.heard = 0

    def start(self, handler: Handler) -> None:
        self._connection.settimeout(SEND_S)
        self._thread = threading.Thread(target=self._take, args=(handler,), name=f"link to {self.peer}", daemon=True)
        self._thread.start()

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """Send one frame. Raise LinkLost."""
        try:
            with self._sending:
                if self.is_lost:
                    raise LinkLost(f"{self.peer} is gone")
                _send(self._connection, kind, *parts)
        except OSError as error:
            self.close()
            raise LinkLost(f"{self.peer} is gone: {error}") from error

    def beat(self) -> None:
        if self.is_lost or not self._sending.acquire(blocking=False):
            return  # a frame is being sent, which also shows that this side lives
        try:
            if select.select([], [self._connection], [], 0)[1]:
                _send(self._connection, FrameKind.BEAT)
        except (OSError, ValueError):  # closed meanwhile; the link's thread reports it
            self.close()
        finally:
            self._sending.release()

    def close(self) -> None:
        """Close the link for both sides. Earlier frames still arrive."""
        self.is_lost = True
        with contextlib.suppress(OSError):  # closed by the peer already
            self._connection.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        self.close()
        if self._thread is not None:
            self._thread.join(SEND_S)
        self._connection.close()

    def _take(self, handler: Handler) -> None:
        try:
            while True:
                kind, payload = _receive(self._connection, deadline=None, heard=self._hear)
                if kind is not FrameKind.BEAT:
                    handler(self.peer, kind, payload)
        except (LinkLost, OSError, TransferError, ValueError, struct.error):  # gone, or invalid data
            return
        finally:
            self.close()
            handler(self.peer, FrameKind.GONE, bytearray())

    def _hear(self) -> None:
        self.heard += 1


class Listener:
    def __init__(self) -> None:
        self._is_closed = False
        self._lock = threading.Lock()
        self._greeted: dict[socket.socket, None] = {}  # connections that have proved nothing yet, eldest first
        self._links: queue.SimpleQueue[Link] = queue.SimpleQueue()
        try:
            self._listening = socket.create_server((LOCAL, 0))
        except OSError as error:
            raise TransferError(f"cannot listen at {LOCAL}: {error}") from error

    @property
    def address(self) -> str:
        return f"{LOCAL}:{self._listening.getsockname()[1]}"

    def accept(self, key: str, hello: dict[str, object], names: set[str]) -> list[Link]:
        """Return a link to each of the named peers. Raise TransferError after HELLO_S."""
        deadline = time.monotonic() + HELLO_S
        links: dict[str, Link] = {}
        self._listening.settimeout(LOOK_S)
        while missing := names - links.keys():
            if time.monotonic() > deadline:
                raise TransferError(f"no connection from {', '.join(sorted(missing))} in {HELLO_S} s")
            self._take_one(key, hello)
            with contextlib.suppress(queue.Empty):
                while True:
                    link = self._links.get_nowait()
                    if link.peer in missing and link.peer not in links:
                        links[link.peer] = link
                    else:
                        link.free()
        return [links[name] for name in sorted(links)]

    def close(self) -> None:
        self._is_closed = True
        with contextlib.suppress(OSError):  # wakes the thread that waits in it
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _take_one(self, key: str, hello: dict[str, object]) -> None:
        try:
            connection, _ = self._listening.accept()
        except TimeoutError:
            return
        except OSError:  # closed; or there are no descriptors, or the connection was cut: the next one may be whole
            if not self._is_closed:
                self._drop_eldest(most=0)
                time.sleep(LOOK_S)
            return
        self._drop_eldest(most=MOST_GREETINGS - 1)
        with self._lock:
            self._greeted[connection] = None
        threading.Thread(target=self._greet, args=(connection, key, hello), name="greeting", daemon=True).start()

    def _drop_eldest(self, *, most: int) -> None:
        with self._lock:
            if len(self._greeted) > most:
                eldest = next(iter(self._greeted))
                del self._greeted[eldest]
                with contextlib.suppress(OSError):  # gone already; its thread closes it
                    eldest.shutdown(socket.SHUT_RDWR)

    def _greet(self, connection: socket.socket, key: str, hello: dict[str, object]) -> None:
        with contextlib.suppress(LinkLost):  # a stranger
            link = _meet(connection, key, hello, time.monotonic() + STRANGER_S, is_first=False)
            self._links.put(link)
        with self._lock:
            self._greeted.pop(connection, None)


def connect(address: str, key: str, hello: dict[str, object]) -> Link:
    deadline = time.monotonic() + HELLO_S
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=HELLO_S)
        return _meet(connection, key, hello, deadline, is_first=True)
    except (LinkLost, OSError, ValueError) as error:
        raise TransferError(f"no peer at {address}: {error}") from error


def _meet(connection: socket.socket, key: str, hello: dict[str, object], deadline: float, *, is_first: bool) -> Link:
    """Exchange proofs of the key and hellos; is_first: this side connected."""
    # kind (1 byte), length (4 bytes), payload; first the PROOF and HELLO frames:
    #
    # connects          listens
    # nonce        ->
    #              <-   nonce
    # proof        ->               HMAC-SHA256 of both nonces by the key of the run
    #              <-   hello       under such a proof of its own, as is the next
    # hello        ->
    ours, sides = secrets.token_hex(16), ("connects", "listens")
    mine, other = sides if is_first else sides[::-1]
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if is_first:
            _send(connection, FrameKind.PROOF, ours.encode())
        theirs = _said(connection, FrameKind.PROOF, deadline).decode("ascii")
        if not is_first:
            _send(connection, FrameKind.PROOF, ours.encode())
        nonces = (ours, theirs) if is_first else (theirs, ours)
        text = json.dumps(hello).encode()
        greeting = _proof(key, f"{mine} hello", nonces, text) + text
        if is_first:
            _send(connection, FrameKind.PROOF, _proof(key, mine, nonces))
        elif not hmac.compare_digest(bytes(_said(connection, FrameKind.PROOF, deadline)), _proof(key, other, nonces)):
            raise LinkLost("a stranger answered")
        else:
            _send(connection, FrameKind.HELLO, greeting)
        said = bytes(_said(connection, FrameKind.HELLO, deadline))
        proof, text = said[:DIGEST_BYTES], said[DIGEST_BYTES:]
        if not hmac.compare_digest(proof, _proof(key, f"{other} hello", nonces, text)):
            raise LinkLost("a stranger answered")
        if is_first:
            _send(connection, FrameKind.HELLO, greeting)
        return Link(connection, json.loads(text))
    except (LinkLost, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        connection.close()
        raise LinkLost(f"no hello: {error}") from error


def _proof(key: str, what: str, nonces: tuple[str, str], text: bytes = b"") -> bytes:
    """Valid for this connection, this side and this text."""
    said = json.dumps([what, *nonces]).encode() + text
    return hmac.digest(key.encode(), said, "sha256")


def _said(connection: socket.socket, kind: FrameKind, deadline: float) -> bytearray:
    said, payload = _receive(connection, deadline=deadline, most=PROOF_BYTES if kind is FrameKind.PROOF else MOST_BYTES)
    if said is not kind:
        raise LinkLost(f"expected a frame {kind.name}, got {said.name}")
    return payload


def _send(connection: socket.socket, kind: FrameKind, *parts: bytes | memoryview) -> None:
    size = sum(len(part) for part in parts)
    if size > MOST_BYTES:
        raise TransferError(f"a frame has at most {MOST_BYTES} bytes, got {size}")
    connection.sendall(HEADER.pack(kind, size))
    for part in parts:
        connection.sendall(part)


def _nobody() -> None: ...


def _receive(
    connection: socket.socket,
    *,
    deadline: float | None,
    heard: Callable[[], None] = _nobody,
    most: int = MOST_BYTES,
) -> tuple[FrameKind, bytearray]:
    kind, size = HEADER.unpack(_exactly(connection, HEADER.size, deadline, heard))
    if kind not in _KINDS or size > most:
        raise LinkLost(f"no frame: kind {kind} with {size} bytes")
    return _KINDS[kind], _exactly(connection, size, deadline, heard)


def _exactly(connection: socket.socket, size: int, deadline: float | None, heard: Callable[[], None]) -> bytearray:
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            count = connection.recv_into(view[have:])
        except TimeoutError:
            if deadline is None:
                continue  # a peer may be silent as long as it likes
            raise
        if not count:
            raise LinkLost("end of stream")
        heard()
        have += count
    return data
