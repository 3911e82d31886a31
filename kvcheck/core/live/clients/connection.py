"""Connects to a server, or to the two servers of a pair, by the user's options."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.clients import CLIENTS, PAIRS, detect
from kvcheck.core.live.clients.client import Client, Reach, Trouble
from kvcheck.core.live.http import Http, is_loopback, parse_address

SCHEMES = ("http://", "https://")
_HOST_AND_PORT = re.compile(r"[\w.-]+:\d+(/.*)?|\[[\da-f:.]+\](:\d+)?(/.*)?", re.ASCII | re.IGNORECASE)


def is_address(target: str) -> bool:
    return target.lower().startswith(SCHEMES)


def address_of(word: str) -> str | None:
    if is_address(word):
        return word
    return f"http://{word}" if _HOST_AND_PORT.fullmatch(word) else None


def check_address(name: str, word: str) -> None:
    """Raise UsageError for a word that is no address. name: of the argument or option."""
    if is_address(word):
        return
    if (address := address_of(word)) is not None:
        raise UsageError(f"{name} {word}: http:// is missing; expected {address}")
    raise UsageError(f"{name}: expected http://HOST:PORT, got {word!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """decode: of a pair whose prefill server is `target`. metrics: addresses of counters. key: sent to all addresses,
    never shown. timeout_s: silence after which a call fails."""

    target: str
    decode: str | None
    engine: str | None
    metrics: tuple[str, ...]
    key: str | None
    timeout_s: float
    allow_remote: bool
    token_of: Callable[[str], int | None]

    def __repr__(self) -> str:
        return f"Connection({self.target})"

    def http(self, address: str) -> Http:
        """Raises UsageError for a malformed address, or another machine that was not allowed."""
        parsed = parse_address(address)
        if not (self.allow_remote or is_loopback(parsed)):
            raise UsageError(
                f"{parsed} is not this machine: expected a server at 127.0.0.1; add --allow-remote if you may load it"
            )
        return Http(parsed, key=self.key, silence_s=self.timeout_s)


def connect(connection: Connection) -> Client:
    metrics = tuple(connection.http(address) for address in connection.metrics)
    server = connection.http(connection.target)
    decode = None if connection.decode is None else connection.http(connection.decode)
    try:
        name = connection.engine or detect(server)
    except Trouble as trouble:
        raise UsageError(f"{trouble}; expected a running server") from trouble
    reach = Reach(server=server, metrics=metrics, token_of=connection.token_of)
    if decode is None:
        return CLIENTS.load(name).make(reach)
    if name not in PAIRS.names():
        raise UsageError(f"--decode: expected a pair of {', '.join(PAIRS.names())}, got {name}; ask its router instead")
    return PAIRS.load(name)(prefill=reach, decode=Reach(server=decode, token_of=connection.token_of))
