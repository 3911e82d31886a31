"""Client: the requests and control calls of one engine.

Invariants:
- A method blocks until the server answers or the time limit passes. `ask` never raises for a server's behaviour; other
  methods raise `Trouble`.
- Methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import Http


class Trouble(Exception):
    """A call other than a request failed. The text is one line."""


class Client(Protocol):
    """One server of one engine.

    counted: kind of evidence -> metrics that count it; the first that exists wins. computed: "request" and "token" ->
    metrics of everything that the engine has finished. said: kinds reported with each request. flags: kind -> server
    flags that make it appear. has_salts: whether a request with a salt shares no cached prefix.
    """

    engine: str
    has_salts: bool
    counted: Mapping[str, tuple[str, ...]]
    computed: Mapping[str, tuple[str, ...]]
    said: frozenset[str]
    flags: Mapping[str, str]

    def served(self) -> Served:
        """Read the server's report about itself. Raises Trouble."""

    def ask(self, sending: Sending) -> Answer:
        """Send a request and wait for its answer, or abort it."""

    def counters(self) -> Counters | None:
        """All counters of all metrics addresses; None if there are none. Raises Trouble."""

    def is_alive(self) -> bool:
        """Whether the server answers its health call."""

    def retract(self) -> None:
        """Make the engine retract or preempt all running requests, and go on. Raises Trouble."""

    def flush(self) -> None:
        """Empty the prefix cache. Raises Trouble, for instance while requests run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Access to a server. metrics: addresses of its counters, if not its own. token_of: id of a word of the model's
    tokenizer, for engines that answer in text."""

    server: Http
    metrics: tuple[Http, ...] = ()
    token_of: Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine. is_at: whether it answers at an address; raises CallFailed if nothing does."""

    make: Callable[[Reach], Client]
    is_at: Callable[[Http], bool]
