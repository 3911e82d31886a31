"""A server that sends bytes as they are written out in a test, whatever HTTP makes of them."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Mapping, Sequence

HANG: bytes = b"hang"
"""In the place of an answer: nothing is sent, and the connection stays open."""
Answer = bytes | Sequence[bytes]


def whole(body: object, *, status: str = "200 OK", kind: str = "application/json") -> bytes:
    """An answer with its length. body: bytes as they are, or a value as JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def stream(*events: object, ends: bool = True) -> list[bytes]:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines = [each if isinstance(each, bytes) else f"data: {json.dumps(each)}\n\n".encode() for each in events]
    if ends:
        lines.append(b"data: [DONE]\n\n")
    return [head, *(b"%x\r\n%s\r\n" % (len(line), line) for line in lines), *([b"0\r\n\r\n"] if ends else [])]


class RawServer:
    """A context manager. paths: answers by path, with the query. tls: to serve over TLS. asked: (head, body) of each
    request, as text."""

    def __init__(
        self, *given: Answer, paths: Mapping[str, Answer] | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.asked: list[tuple[str, str]] = []
        self.closed_early = threading.Event()
        """Set once a client has closed its connection while the server hangs."""
        self._answers, self._paths = list(given), paths
        self._tls, self._over = tls, threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> RawServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        with socket.create_connection(("127.0.0.1", self.port), timeout=1):  # wakes whoever accepts
            pass
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        while True:
            plain, _ = self._listener.accept()
            if self._over.is_set():
                plain.close()
                return
            try:
                with self._tls.wrap_socket(plain, server_side=True) if self._tls else plain as peer:
                    self._one(peer)
            except OSError:  # the client has closed the connection, or speaks no TLS
                plain.close()

    def _one(self, peer: socket.socket) -> None:
        head, body = b"", b""
        while b"\r\n\r\n" not in head:
            piece = peer.recv(65536)
            if not piece:
                return
            head += piece
        head, _, body = head.partition(b"\r\n\r\n")
        size = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0)
        while len(body) < size:
            body += peer.recv(65536)
        self.asked.append((head.decode(), body.decode()))
        if self._paths is not None:
            answer = self._paths.get(head.split()[1].decode(), whole({"detail": "Not Found"}, status="404 Not Found"))
        else:
            answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        for piece in [answer] if isinstance(answer, bytes) else answer:
            if piece == HANG:
                self._hang(peer)
            else:
                peer.sendall(piece)

    def _hang(self, peer: socket.socket) -> None:
        peer.settimeout(0.01)
        while not self._over.is_set():
            try:
                if not peer.recv(1):
                    self.closed_early.set()
                    return
            except TimeoutError:
                continue
            except OSError:
                self.closed_early.set()
                return
