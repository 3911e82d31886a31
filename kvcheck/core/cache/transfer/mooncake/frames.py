"""Frames between a worker and its engine process: a header of numbers, then bytes, over a socket pair.

Invariants:
- A frame is numbers, JSON or raw columns, so it cannot name code to run.
- The size of a frame is checked before memory is allocated for it.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

HEADER = struct.Struct("=IIQ")
COUNT = struct.Struct("=Q")
CODE = struct.Struct("=q")
MOST_PAYLOAD_BYTES = 1 << 20
MOST_DESCRIPTORS = 250  # the kernel takes 253 in one message
CHUNK_BYTES = 1 << 16


# kind, number: uint32; length of the payload: uint64; payload
# START    settings, as JSON; the regions' descriptors travel with it
# READY    the port and the addresses, as JSON
# REFUSED  the reason why there is no engine, as JSON
# WRITE    entries and 64-bit columns [local address | remote address | bytes], then the peer's session in UTF-8
# DONE     the library's code, 64 bits
class FrameType(IntEnum):
    START = 1
    READY = 2
    REFUSED = 3
    WRITE = 4
    DONE = 5


KINDS = {int(kind): kind for kind in FrameType}


@dataclass(frozen=True, slots=True)
class Frame:
    kind: FrameType
    number: int
    payload: bytes


class ChannelClosed(Exception):
    """The other side is gone, or sent an invalid frame."""


class ChannelTimeout(Exception):
    pass


class Channel:
    """Whole frames over a stream socket. Deadlines are times of `time.monotonic`; None waits for ever."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._received = bytearray()
        self.descriptors: list[int] = []

    def fileno(self) -> int:
        return self._link.fileno()

    def send(
        self,
        kind: FrameType,
        number: int,
        payload: bytes,
        *,
        deadline: float | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """The descriptors arrive in the receiver's `descriptors`."""
        data = memoryview(HEADER.pack(kind, number, len(payload)) + payload)
        try:
            self._limit(deadline)
            sent = socket.send_fds(self._link, [data], descriptors) if descriptors else self._link.send(data)
            while sent < len(data):
                self._limit(deadline)
                sent += self._link.send(data[sent:])
        except (TimeoutError, BlockingIOError) as error:
            raise ChannelTimeout from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, *, deadline: float | None = None, descriptors: int = 0) -> Frame:
        """descriptors: most that may come with the frame."""
        while (frame := self._next()) is None:
            try:
                self._limit(deadline)
                if descriptors:
                    data, received, _, _ = socket.recv_fds(self._link, CHUNK_BYTES, descriptors)
                    self.descriptors += received
                else:
                    data = self._link.recv(CHUNK_BYTES)
            except (TimeoutError, BlockingIOError) as error:
                raise ChannelTimeout from error
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not data:
                raise ChannelClosed("end of stream")
            self._received += data
        return frame

    def close(self) -> None:
        self._link.close()

    def _limit(self, deadline: float | None) -> None:
        if deadline is not None:
            self._link.settimeout(max(deadline - time.monotonic(), 0.0))  # 0: do not block
        elif self._link.gettimeout() is not None:
            self._link.settimeout(None)

    def _next(self) -> Frame | None:
        if len(self._received) < HEADER.size:
            return None
        kind, number, length = HEADER.unpack_from(self._received)
        if kind not in KINDS or length > MOST_PAYLOAD_BYTES:
            raise ChannelClosed(f"no frame: kind {kind} with {length} bytes")
        end = HEADER.size + length
        if len(self._received) < end:
            return None
        payload = bytes(memoryview(self._received)[HEADER.size : end])
        del self._received[:end]
        return Frame(KINDS[kind], number, payload)


def pack_json(value: object) -> bytes:
    return json.dumps(value).encode()


def unpack_json(payload: bytes) -> dict[str, object]:
    """Raise ChannelClosed unless it is a JSON object."""
    try:
        value = json.loads(payload)
    except ValueError as error:
        raise ChannelClosed(f"no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChannelClosed(f"expected an object, got {type(value).__name__}")
    return value


def pack_call(columns: bytes, peer: str) -> bytes:
    """columns: int64 [3, n] in C order: local addresses, remote addresses, bytes."""
    return COUNT.pack(len(columns) // 24) + columns + peer.encode()


def unpack_call(payload: bytes) -> tuple[str, list[int], list[int], list[int]]:
    (entries,) = COUNT.unpack_from(payload)
    end = COUNT.size + entries * 24
    if end > len(payload):
        raise ChannelClosed(f"{entries} entries do not fit a payload of {len(payload)} bytes")
    numbers = memoryview(payload)[COUNT.size : end].cast("q")
    local, remote, length = (numbers[at * entries : (at + 1) * entries].tolist() for at in range(3))
    return payload[end:].decode(), local, remote, length
