"""Links: one TCP connection between two ranks, with a thread that takes what the peer sends as it comes.

    kind (1 byte), length (4 bytes), payload; first of all a HELLO from each side, with the key of the run

Invariants:
- Loopback is where links are unless an address is given. The key tells strangers apart and hides nothing: beyond one
  machine, links are for networks where everybody is trusted.
- A peer that says the wrong key, or anything before its hello, is not listened to, and is told nothing.
- Every wait has a bound. A peer that takes nothing for SEND_S seconds is as gone as one that closed.
- A link that was closed on this side hands over what had come by then, and nothing of what comes later.
- Frames of one link arrive whole and in order, and GONE once, behind all of them.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from enum import IntEnum

from kvcheck.core.errors import TransferError

HEADER = struct.Struct("=BI")
MOST_BYTES = 64 << 20
SEND_S = 20.0
HELLO_S = 60.0
STRANGER_S = 5.0
"""How long one that connected may take to say its hello; peers say it at once."""
LOCAL = "127.0.0.1"


class FrameKind(IntEnum):
    """What a frame is. MESSAGE, ENGINE, FENCE: JSON. DATA: bytes for regions. BEAT: empty. GONE: never sent."""

    HELLO = 1
    MESSAGE = 2
    DATA = 3
    ENGINE = 4
    FENCE = 5
    GONE = 6
    BEAT = 7


_KINDS = {int(kind): kind for kind in FrameKind if kind is not FrameKind.GONE}

Handler = Callable[[str, FrameKind, bytearray], None]
"""Called by the link's thread: the peer, and a frame of it."""


class LinkLost(Exception):
    """The peer is gone, or sent what is no frame."""


class Link:
    """A connection whose both ends have said hello. hello: what the peer said. heard: how often it was heard."""

    def __init__(self, connection: socket.socket, hello: dict[str, object]) -> None:
        self.hello = hello
        self.peer = str(hello["name"])
        self._connection = connection
        self._sending = threading.Lock()
        self._thread: threading.Thread | None = None
        self.is_lost = False
        self.heard = 0

    def start(self, handler: Handler) -> None:
        """Take frames from now on, in a thread of their own."""
        self._connection.settimeout(SEND_S)
        self._thread = threading.Thread(target=self._take, args=(handler,), name=f"link to {self.peer}", daemon=True)
        self._thread.start()

    def send(self, kind: FrameKind, *parts: bytes | memoryview) -> None:
        """One frame; returns when the kernel has taken all of it. Raises LinkLost."""
        try:
            with self._sending:
                if self.is_lost:
                    raise LinkLost(f"{self.peer} is gone")
                _send(self._connection, kind, *parts)
        except OSError as error:
            self.close()
            raise LinkLost(f"{self.peer} is gone: {error}") from error

    def beat(self) -> None:
        """Say that this side lives, where that needs no waiting."""
        if self.is_lost or not self._sending.acquire(blocking=False):
            return  # somebody is sending, which says the same
        try:
            if select.select([], [self._connection], [], 0)[1]:
                _send(self._connection, FrameKind.BEAT)
        except (OSError, ValueError):  # closed under it; the link's thread says so
            self.close()
        finally:
            self._sending.release()

    def close(self) -> None:
        """End it for both sides; what was sent before still arrives."""
        self.is_lost = True
        with contextlib.suppress(OSError):  # closed by the peer already
            self._connection.shutdown(socket.SHUT_RDWR)

    def free(self) -> None:
        """Close and forget the socket, once the thread is done with it."""
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
        except (LinkLost, OSError, TransferError, ValueError, struct.error):  # gone, or it sent what nobody can read
            return
        finally:
            self.close()
            handler(self.peer, FrameKind.GONE, bytearray())

    def _hear(self) -> None:
        self.heard += 1


class Listener:
    """Where a rank waits for its peers, at first and when one of them has been started again."""

    def __init__(self, host: str = LOCAL) -> None:
        self._host = host
        try:
            self._listening = socket.create_server((host, 0))
        except OSError as error:
            raise TransferError(f"cannot listen at {host}: {error}; expected an address of this machine") from error

    @property
    def address(self) -> str:
        """Where peers reach it."""
        return f"{self._host}:{self._listening.getsockname()[1]}"

    def accept(self, key: str, hello: dict[str, object], names: set[str]) -> list[Link]:
        """A link to each of the named peers. Raises TransferError where one does not come in time."""
        deadline = time.monotonic() + HELLO_S
        links: dict[str, Link] = {}
        while missing := names - links.keys():
            self._listening.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = self._listening.accept()
            except TimeoutError as error:
                raise TransferError(f"no connection from {', '.join(sorted(missing))} in {HELLO_S} s") from error
            with contextlib.suppress(LinkLost):  # a stranger; go on waiting for those expected
                link = _greet(connection, key, hello, min(deadline, time.monotonic() + STRANGER_S), is_first=False)
                if link.peer in missing:
                    links[link.peer] = link
        return [links[name] for name in sorted(links)]

    def keep(self, key: str, hello: dict[str, object], handler: Callable[[Link], None]) -> None:
        """Greet whoever comes later too, in a thread of its own, and hand the link over, not started yet."""
        threading.Thread(target=self._keep, args=(key, hello, handler), name="listener", daemon=True).start()

    def close(self) -> None:
        """Nobody is waited for any more."""
        with contextlib.suppress(OSError):  # wakes the thread that waits in it
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _keep(self, key: str, hello: dict[str, object], handler: Callable[[Link], None]) -> None:
        self._listening.settimeout(None)
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return  # closed
            with contextlib.suppress(LinkLost):  # a stranger
                handler(_greet(connection, key, hello, time.monotonic() + STRANGER_S, is_first=False))


def connect(address: str, key: str, hello: dict[str, object]) -> Link:
    """A link to the rank that listens there. Raises TransferError."""
    deadline = time.monotonic() + HELLO_S
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=HELLO_S)
        return _greet(connection, key, hello, deadline, is_first=True)
    except (LinkLost, OSError, ValueError) as error:
        raise TransferError(f"no peer at {address}: {error}") from error


def _greet(connection: socket.socket, key: str, hello: dict[str, object], deadline: float, *, is_first: bool) -> Link:
    """Hello and hello; whoever was connected to says nothing before it has seen the key."""
    text = json.dumps({**hello, "key": key}).encode()
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if is_first:
            _send(connection, FrameKind.HELLO, text)
        kind, payload = _receive(connection, deadline=deadline)
        said = json.loads(payload)
        if kind is not FrameKind.HELLO or not hmac.compare_digest(str(said["key"]).encode(), key.encode()):
            raise LinkLost("a stranger answered")
        if not is_first:
            _send(connection, FrameKind.HELLO, text)
        return Link(connection, said)
    except (LinkLost, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        connection.close()
        raise LinkLost(f"no hello: {error}") from error


def _send(connection: socket.socket, kind: FrameKind, *parts: bytes | memoryview) -> None:
    size = sum(len(part) for part in parts)
    if size > MOST_BYTES:
        raise TransferError(f"a frame has at most {MOST_BYTES} bytes, got {size}")
    connection.sendall(HEADER.pack(kind, size))
    for part in parts:
        connection.sendall(part)


def _nobody() -> None:
    """Whom it does not matter to that something came."""


def _receive(
    connection: socket.socket, *, deadline: float | None, heard: Callable[[], None] = _nobody
) -> tuple[FrameKind, bytearray]:
    kind, size = HEADER.unpack(_exactly(connection, HEADER.size, deadline, heard))
    if kind not in _KINDS or size > MOST_BYTES:
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
