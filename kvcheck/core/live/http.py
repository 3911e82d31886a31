"""Calls to a server over HTTP, with a distinct failure for every way in which they fail.

Invariants:
- A key goes into one header and into no text, also if the server repeats it.
- Proxies of the environment are ignored. Certificates are checked against the system's authorities.
- Each call opens and closes a connection: a kept one hides that a server closes them.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from kvcheck.core.base.errors import UsageError, machine_trouble
from kvcheck.core.live.exchange import End

MOST_BYTES = 32 << 20  # of one answer, or of one event of a stream
MOST_STREAM_BYTES = 1 << 30  # of all events of a stream, which some engines send with all tokens so far
MOST_TEXT = 240  # characters of a server that are shown
_READ = 1 << 16
_STREAM, _WHOLE = "text/event-stream", "application/json"
_PORTS = {"http": 80, "https": 443}
_EXPECTED = "expected http://HOST:PORT or https://HOST:PORT, with a path if the server has one"


class CallFailed(Exception):
    def __init__(self, end: End, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.end, self.reason, self.status = end, reason, status


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A server's address. base: prefix of each path, without a slash at its end."""

    scheme: str
    host: str
    port: int
    base: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.base}"


def parse_address(text: str) -> Address:
    """Parse an address; drop a /v1 at its end. Raises UsageError, which does not repeat a password."""
    if "@" in text:
        raise UsageError(f"an address holds no user and no password; {_EXPECTED}. A key is named, not written")
    if not text or not text.isascii() or not text.isprintable() or any(c in text for c in ' "\\'):
        raise UsageError(f"an address is printable text without spaces; {_EXPECTED}, got {text!r}")
    if "?" in text or "#" in text:
        raise UsageError(f"an address has no query and no fragment; {_EXPECTED}, got {text}")
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError as error:
        raise UsageError(f"{text} is no address: {error}; {_EXPECTED}") from error
    if parts.scheme not in _PORTS:
        raise UsageError(f"an address begins with http:// or https://; {_EXPECTED}, got {text}")
    if not parts.hostname or parts.netloc.endswith(":"):
        raise UsageError(f"{text} lacks a {'port' if parts.hostname else 'host'}; {_EXPECTED}")
    if port == 0:
        raise UsageError(f"no server listens at port 0; {_EXPECTED}, got {text}")
    base = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Address(scheme=parts.scheme, host=parts.hostname, port=port or _PORTS[parts.scheme], base=base)


def is_loopback(address: Address) -> bool:
    if address.host == "localhost":
        return True
    try:
        number = ipaddress.ip_address(address.host)
    except ValueError:
        return False
    return number.is_loopback if number.version == 4 else number == ipaddress.IPv6Address(1)


def one_line(text: str, most: int = MOST_TEXT) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text[: 16 * most]).split())
    return line if len(line) <= most else line[: most - 3] + "..."


class Http:
    """One server. silence_s: seconds without a byte, or without a stream's event, after which a call fails."""

    def __init__(self, address: Address, *, key: str | None = None, silence_s: float = 60.0) -> None:
        if key is not None and not (key.isascii() and key.isprintable() and key and " " not in key):
            raise UsageError("a key is printable ASCII without spaces; the one given is not, or it is empty")
        self.address, self.silence_s = address, silence_s
        self._key = key
        self._tls = ssl.create_default_context() if address.scheme == "https" else None

    def __repr__(self) -> str:
        return f"Http({self.address})"

    def get_json(self, path: str, *, silence_s: float | None = None) -> object:
        return self._json(_name("GET", path), self.call("GET", path, silence_s=silence_s))

    def get_text(self, path: str, *, silence_s: float | None = None) -> str:
        return self.call("GET", path, silence_s=silence_s).decode(errors="replace")

    def post_json(self, path: str, body: object) -> object:
        return self._json(_name("POST", path), self.call("POST", path, body))

    def call(self, method: str, path: str, body: object = None, *, silence_s: float | None = None) -> bytes:
        """The whole answer to one call. Raises CallFailed, as the other calls do."""
        limit_s = self.silence_s if silence_s is None else silence_s
        name = _name(method, path)
        with self._open(method, path, body, limit_s) as exchange:
            answer = bytearray()
            try:
                for piece in exchange.pieces():
                    answer += piece
                    if len(answer) > MOST_BYTES:
                        raise CallFailed(End.UNREADABLE, f"{name}: its answer is longer than {MOST_BYTES >> 20} MB")
            except (OSError, http.client.HTTPException) as error:
                raise self._failure(name, error, limit_s) from error
            return bytes(answer)

    def stream(self, path: str, body: object) -> Events:
        """Start a stream of events; leaving its `with` block closes the connection."""
        name = _name("POST", path)
        exchange = self._open("POST", path, body, self.silence_s)
        kind = exchange.response.getheader("Content-Type", "")
        known = kind.partition(";")[0].strip().lower()
        if known not in (_STREAM, _WHOLE):
            exchange.close()
            raise CallFailed(End.UNREADABLE, f"{name}: expected {_STREAM}, got {self.shown(kind)!r}")
        return Events(self, exchange, name, is_whole=known == _WHOLE)

    def shown(self, text: str) -> str:
        if self._key is not None:
            for written in {self._key, json.dumps(self._key)[1:-1]}:
                text = text.replace(written, "<key>")
        return one_line(text)

    def _open(self, method: str, path: str, body: object, limit_s: float) -> _Exchange:
        """Send a request and read the head of its answer. A status of 300 or more is CallFailed."""
        name = _name(method, path)
        headers = {"Connection": "close", "Accept": "*/*"}
        sent = None if body is None else json.dumps(body).encode()
        if sent is not None:
            headers["Content-Type"] = "application/json"
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        connection = self._connection(limit_s)
        try:
            connection.connect()
            peer = connection.sock
        except (OSError, UnicodeError) as error:
            connection.close()
            raise self._unreached(name, error, limit_s) from error
        try:
            connection.request(method, self.address.base + path, sent, headers)
            exchange = _Exchange(connection, connection.getresponse(), peer)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            failure = self._failure(name, error, limit_s)
            if failure.end is End.CUT:  # not a byte of an answer: a full queue of connections looks the same
                failure.end = End.UNREACHED
            raise failure from error
        if exchange.response.status < 300:
            return exchange
        with exchange:
            status = exchange.response.status
            text = self.shown(_said(exchange.beginning())) or self.shown(exchange.response.reason)
            if status == http.HTTPStatus.UNAUTHORIZED:
                text += "; --key-env NAME names the variable that holds its key"
                text += "" if self._key is None else ", and this one holds another"
            raise CallFailed(End.REFUSED, f"{name}: status {status}: {text}", status)

    def _connection(self, limit_s: float) -> http.client.HTTPConnection:
        host, port = self.address.host, self.address.port
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=limit_s)
        return http.client.HTTPSConnection(host, port, timeout=limit_s, context=self._tls)

    def _unreached(self, name: str, error: Exception, limit_s: float) -> CallFailed:
        if machine_trouble(error) is not None:
            raise error
        if isinstance(error, ssl.SSLCertVerificationError):
            why = (
                f"its certificate is refused: {error.verify_message}; SSL_CERT_FILE names a file of further authorities"
            )
        elif isinstance(error, ssl.SSLError):
            why = f"no TLS: {error.reason or error}; an address of a server without TLS begins with http://"
        elif isinstance(error, TimeoutError):
            why = f"no connection within {limit_s:g} s"
        elif isinstance(error, socket.gaierror | UnicodeError):
            why = "the name of the host is not known"
        else:
            why = getattr(error, "strerror", None) or str(error)
        return CallFailed(End.UNREACHED, f"{name}: {self.address}: {one_line(why)}")

    def _failure(self, name: str, error: OSError | http.client.HTTPException, limit_s: float) -> CallFailed:
        if machine_trouble(error) is not None:
            raise error
        if isinstance(error, TimeoutError):
            return CallFailed(End.SILENT, f"{name}: no byte within {limit_s:g} s")
        if isinstance(error, http.client.RemoteDisconnected):
            return CallFailed(End.CUT, f"{name}: the connection was closed without an answer")
        if isinstance(error, http.client.IncompleteRead):
            return CallFailed(End.CUT, f"{name}: the connection was closed inside the answer")
        if isinstance(error, OSError):
            return CallFailed(End.CUT, f"{name}: the connection broke: {one_line(error.strerror or str(error))}")
        return CallFailed(End.UNREADABLE, f"{name}: the answer is no HTTP: {self.shown(str(error))}")

    def _json(self, name: str, answer: bytes) -> object:
        try:
            return parse_json(answer)
        except ValueError as error:
            text = self.shown(answer[: 16 * MOST_TEXT].decode(errors="replace"))
            raise CallFailed(End.UNREADABLE, f"{name}: expected JSON, got {one_line(text, 80)!r}") from error


class _Exchange:
    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, peer: socket.socket
    ) -> None:
        self.response, self.peer = response, peer
        self._connection = connection

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.response.close()
        self._connection.close()

    def pieces(self) -> Iterator[bytes]:
        """Raises IncompleteRead if the answer ends before its length."""
        left = self.response.length  # None: in chunks, or until the connection is closed
        while left is None or left > 0:
            piece = self.response.read1(_READ if left is None else min(_READ, left))
            if not piece and left:
                raise http.client.IncompleteRead(b"", left)
            if not piece:
                return
            left = None if left is None else left - len(piece)
            yield piece

    def beginning(self) -> bytes:
        answer = bytearray()
        try:
            for piece in self.pieces():
                answer += piece
                if len(answer) >= _READ:
                    break
        except (OSError, http.client.HTTPException) as error:
            if machine_trouble(error) is not None:
                raise
        return bytes(answer[:_READ])


class Events:
    """Server-sent events of one answer, as JSON values. Leaving the context closes the connection.

    Comments are no activity: an engine that hangs may still send them. is_ended: the server sent [DONE]. reads: pieces
    read; events of one piece arrived together. is_whole: the answer is one event, not streamed.
    """

    def __init__(self, server: Http, exchange: _Exchange, name: str, *, is_whole: bool = False) -> None:
        self._server, self._exchange, self._name = server, exchange, name
        self._is_whole = is_whole
        self.is_ended = False
        self.reads = 0

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._exchange.close()

    def __iter__(self) -> Iterator[object]:
        limit_s = self._server.silence_s
        pieces, buffer, total = self._exchange.pieces(), bytearray(), 0
        last_s = time.monotonic()
        while not self.is_ended:
            try:
                left_s = last_s + limit_s - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                self._exchange.peer.settimeout(left_s)
                piece = next(pieces, None)
            except (OSError, http.client.HTTPException) as error:
                raise self._server._failure(self._name, error, limit_s) from error
            if piece is None:
                if self._is_whole:
                    yield self._server._json(self._name, bytes(buffer))
                return
            self.reads += 1
            total += len(piece)
            seen = len(buffer)
            buffer += piece
            if len(buffer) > MOST_BYTES or total > MOST_STREAM_BYTES:
                raise CallFailed(End.UNREADABLE, f"{self._name}: an event or the stream is too long")
            while not self._is_whole and (end := buffer.find(b"\n", seen)) >= 0:
                line, seen = bytes(buffer[:end]), 0
                del buffer[: end + 1]
                data = self._data(line)
                if data is not None and not self.is_ended:
                    yield self._server._json(self._name, data)
                    last_s = time.monotonic()

    def _data(self, line: bytes) -> bytes | None:
        """Each engine puts an event's data on one line."""
        name, _, data = line.rstrip(b"\r").partition(b":")
        data = data.strip()
        if name == b"error":  # llama.cpp
            raise CallFailed(End.REFUSED, f"{self._name}: {self._server.shown(_said(data))}")
        if name == b"data" and data == b"[DONE]":
            self.is_ended = True
        return data if name == b"data" and data and not self.is_ended else None


def parse_json(text: bytes | str) -> object:
    """Parse JSON. Raises ValueError, also for too deep nesting."""
    try:
        value: object = json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON that nests too deep") from error
    return value


def _name(method: str, path: str) -> str:
    return f"{method} {path.partition('?')[0]}"


def _said(answer: bytes) -> str:
    try:
        value = parse_json(answer)
    except ValueError:
        return answer.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    return value if isinstance(value, str) else answer.decode(errors="replace")


def error_text(value: object) -> str:
    return _said(json.dumps(value).encode())
