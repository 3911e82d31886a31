"""A stand-in for the transfer engine: it moves bytes over loopback sockets, and says when they have landed.

MC_STAND_IN names the fault: early, torn, late, unawaited, unregistered, refused-elsewhere, late-failure,
early-notification, dies-with-peer.
"""

import ctypes
import itertools
import os
import socket
import struct
import threading
import time

HEAD = struct.Struct("!cQQ")
REFUSED, LANDED = b"n", b"y"
LATE_S = 0.15
AGAIN_S = 0.5


def exactly(link: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = link.recv_into(left)
        if not count:
            raise ConnectionError("closed")
        left = left[count:]
    return data


class TransferOpcode:
    Read, Write = 0, 1


class TransferNotify:
    def __init__(self, name: str = "", msg: str = "") -> None:
        self.name, self.msg = name, msg


class TransferEngine:
    def initialize(self, host: str, metadata: str, protocol: str, device: str) -> int:
        self._fault = os.environ.get("MC_STAND_IN", "")
        self._limit_s = float(os.environ.get("MC_TCP_PROGRESS_TIMEOUT_SEC", "30"))
        self._regions: dict[int, int] = {}
        self._notes: list[TransferNotify] = []
        self._tickets: dict[int, list[int]] = {}
        self._numbers = itertools.count(1)
        self._listener = socket.create_server((host, 0))
        threading.Thread(target=self._accept, daemon=True).start()
        return 0

    def get_rpc_port(self) -> int:
        return int(self._listener.getsockname()[1])

    def register_memory(self, address: int, size: int) -> int:
        self._regions[address] = size
        return 0

    def unregister_memory(self, address: int) -> int:
        return 0 if self._regions.pop(address, None) else -3

    def get_notifies(self) -> list[TransferNotify]:
        notes, self._notes = self._notes, []
        return notes

    # Writers

    def transfer_sync_write(self, target: str, local: int, remote: int, size: int) -> int:
        return self.batch_transfer_sync_write(target, [local], [remote], [size])

    def batch_transfer_sync_write(self, target: str, local: list[int], remote: list[int], size: list[int]) -> int:
        if self._fault == "unawaited":
            threading.Thread(target=self._write, args=(target, local, remote, size, None), daemon=True).start()
            return 0
        return self._write(target, local, remote, size, None)

    def batch_transfer_async_write(self, target: str, local: list[int], remote: list[int], size: list[int]) -> int:
        ticket, codes = next(self._numbers), []
        self._tickets[ticket] = codes
        threading.Thread(target=lambda: codes.append(self._write(target, local, remote, size, None))).start()
        return ticket

    def get_batch_transfer_status(self, tickets: list[int]) -> int:
        while not all(self._tickets[ticket] for ticket in tickets):
            time.sleep(0.0005)
        return min(self._tickets.pop(ticket)[0] for ticket in tickets)

    def transfer_submit_write(self, target: str, local: int, remote: int, size: int) -> int:
        return self.batch_transfer_async_write(target, [local], [remote], [size])

    def transfer_check_status(self, ticket: int) -> int:
        if not self._tickets[ticket]:
            return 0
        return 1 if self._tickets.pop(ticket)[0] == 0 else -1

    def transfer_sync(self, target, local, remote, size, opcode, note) -> int:  # type: ignore[no-untyped-def]
        return self._write(target, [local], [remote], [size], note)

    def batch_transfer_sync(self, target, local, remote, size, opcode, note) -> int:  # type: ignore[no-untyped-def]
        return self._write(target, local, remote, size, note)

    def _write(
        self, target: str, local: list[int], remote: list[int], size: list[int], note: TransferNotify | None
    ) -> int:
        host, _, port = target.partition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=self._limit_s) as link:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._send(link, local, remote, size, note)
        except OSError:
            if self._fault == "dies-with-peer":
                os.abort()
            return -1

    def _send(
        self,
        link: socket.socket,
        local: list[int],
        remote: list[int],
        size: list[int],
        note: TransferNotify | None,
    ) -> int:
        name = (note.name if note else "").encode()
        if name and self._fault == "early-notification":
            link.sendall(HEAD.pack(b"n", 0, len(name)) + name)
            exactly(link, 1)
        for start, to, count in zip(local, remote, size, strict=True):
            link.sendall(HEAD.pack(b"w", to, count))
            link.sendall((ctypes.c_char * count).from_address(start))
            if exactly(link, 1) != LANDED:
                if self._fault == "late-failure":
                    host, port = link.getpeername()
                    threading.Timer(
                        LATE_S, self._write, (f"{host}:{port}", local[1:], remote[1:], size[1:], None)
                    ).start()
                return -1
        if name and self._fault != "early-notification":
            link.sendall(HEAD.pack(b"n", 0, len(name)) + name)
            exactly(link, 1)
        return 0

    # Receivers

    def _accept(self) -> None:
        while True:
            link, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(link,), daemon=True).start()

    def _serve(self, link: socket.socket) -> None:
        try:
            while True:
                kind, address, size = HEAD.unpack(exactly(link, HEAD.size))
                data = exactly(link, size)
                if kind == b"n":
                    self._notes.append(TransferNotify(data.decode()))
                    link.sendall(LANDED)
                else:
                    link.sendall(self._land(address, data))
        except OSError:
            link.close()

    def _land(self, address: int, data: bytearray) -> bytes:
        is_known = any(
            start <= address and address + len(data) <= start + size for start, size in self._regions.items()
        )
        if not is_known and self._fault != "unregistered":
            if self._fault == "refused-elsewhere":
                start, size = max(self._regions.items(), key=lambda region: region[1])
                self._put([(start + size // 2, data)])
            return REFUSED
        whole = [(address, data)]
        if self._fault == "early":
            self._later(whole)
        elif self._fault == "torn":
            half = len(data) // 16 * 8
            self._put([(address, data[:half])])
            self._later([(address + half, data[half:])])
        elif self._fault == "late":
            self._put(whole)
            self._later(whole, AGAIN_S)
        else:
            self._put(whole)
        return LANDED

    def _later(self, pieces: list[tuple[int, bytearray]], after_s: float = LATE_S) -> None:
        threading.Timer(after_s, self._put, (pieces,)).start()

    def _put(self, pieces: list[tuple[int, bytearray]]) -> None:
        for address, data in pieces:
            ctypes.memmove(address, (ctypes.c_char * len(data)).from_buffer(data), len(data))
