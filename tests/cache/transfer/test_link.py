"""Links among strangers: who is silent delays nobody, who knows no key is told none, and a listener survives."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from kvcheck.core.base.errors import TransferError
from kvcheck.core.cache.transfer.sockets import link as module
from kvcheck.core.cache.transfer.sockets.link import (
    HEADER,
    MOST_GREETINGS,
    PROOF_BYTES,
    FrameKind,
    Link,
    Listener,
    connect,
)

KEY = "0123456789abcdef0123456789abcdef"
SOON_S = 2.0


@pytest.fixture
def opened() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def stranger_of(listener: Listener, opened: contextlib.ExitStack) -> socket.socket:
    host, port = listener.address.split(":")
    return opened.enter_context(socket.create_connection((host, int(port))))


def waiting_for_peer(listener: Listener) -> list[Link]:
    """The peer's link, once the listener has accepted it."""
    found: list[Link] = []

    def accept() -> None:
        found.extend(listener.accept(KEY, {"name": "here"}, {"peer"}))

    threading.Thread(target=accept, daemon=True).start()
    return found


def check_met(listener: Listener, found: list[Link], within_s: float) -> None:
    """A peer connects, and both sides know each other in time; neither hello has the key."""
    began = time.monotonic()
    ours = connect(listener.address, KEY, {"name": "peer"})
    while not found and time.monotonic() < began + within_s:
        time.sleep(0.01)
    assert time.monotonic() - began < within_s
    assert [link.peer for link in found] == ["peer"] and ours.peer == "here"
    assert "key" not in found[0].hello and "key" not in ours.hello
    for link in (*found, ours):
        link.free()


@pytest.mark.parametrize("count", [0, 3, 13, MOST_GREETINGS + 8])
def test_silent_strangers_delay_no_peer(listener: Listener, opened: contextlib.ExitStack, count: int) -> None:
    for _ in range(count):
        stranger_of(listener, opened)
    check_met(listener, waiting_for_peer(listener), SOON_S)


def received(connection: socket.socket) -> tuple[int, bytes]:
    kind, size = HEADER.unpack(connection.recv(HEADER.size, socket.MSG_WAITALL))
    return kind, connection.recv(size, socket.MSG_WAITALL) if size else b""


def framed(kind: int, payload: bytes) -> bytes:
    return HEADER.pack(kind, len(payload)) + payload


@pytest.mark.parametrize("is_mirror", [False, True], ids=["hello", "mirror"])
def test_who_took_over_a_port_learns_no_key_and_no_hello(is_mirror: bool) -> None:
    heard = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as fake:

        def answer() -> None:
            connection, _ = fake.accept()
            with connection:
                _, nonce = received(connection)
                connection.sendall(framed(FrameKind.PROOF, nonce if is_mirror else b"0" * 32))
                _, proof = received(connection)
                connection.sendall(framed(FrameKind.HELLO, proof + b'{"name": "prefill-0"}'))
                heard.extend(nonce + proof + connection.recv(1 << 16))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(TransferError, match="no peer at"):
            connect(f"127.0.0.1:{fake.getsockname()[1]}", KEY, {"name": "peer", "where": "secret"})
        thread.join(10)
    assert len(heard) == 32 + 32, "a nonce and a proof"
    assert KEY.encode() not in heard and bytes.fromhex(KEY) not in heard and b"secret" not in heard


def test_a_proof_is_good_for_one_connection(listener: Listener, opened: contextlib.ExitStack) -> None:
    found = waiting_for_peer(listener)
    first, second = stranger_of(listener, opened), stranger_of(listener, opened)
    first.sendall(framed(FrameKind.PROOF, b"n" * 32))
    _, nonce = received(first)
    proof = module._proof(KEY, "connects", ("n" * 32, nonce.decode()))
    second.sendall(framed(FrameKind.PROOF, b"n" * 32) + framed(FrameKind.PROOF, proof))
    assert received(second)[0] == FrameKind.PROOF
    assert second.recv(1) == b"", "a proof of another connection is a stranger's"
    first.sendall(framed(FrameKind.PROOF, proof))
    assert received(first)[0] == FrameKind.HELLO, "on its own it is one"
    first.sendall(framed(FrameKind.HELLO, b"0" * 32 + b'{"name": "peer"}'))
    assert first.recv(1) == b"", "a hello that is not proved is a stranger's"
    check_met(listener, found, 10)


def test_a_stranger_cannot_ask_for_memory(listener: Listener, opened: contextlib.ExitStack) -> None:
    found = waiting_for_peer(listener)
    stranger = stranger_of(listener, opened)
    stranger.sendall(HEADER.pack(FrameKind.PROOF, PROOF_BYTES + 1))
    assert stranger.recv(1) == b""
    check_met(listener, found, 10)


class Poor:
    """A listening socket whose process has no descriptors left for a while."""

    def __init__(self, inner: socket.socket, times: int) -> None:
        self._inner, self.times = inner, times

    def accept(self) -> tuple[socket.socket, object]:
        if self.times:
            self.times -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._inner.accept()

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def test_a_listener_without_descriptors_goes_on_when_there_are_some(listener: Listener) -> None:
    poor = Poor(listener._listening, 3)
    listener._listening = poor  # type: ignore[assignment]
    check_met(listener, waiting_for_peer(listener), 10)
    assert poor.times == 0
