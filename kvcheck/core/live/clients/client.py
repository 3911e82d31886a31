"""Client: how one engine is asked, and what it can be made to do.

Invariants:
- A method blocks until the server answered or the time limit passed. `ask` never raises for what a server does: its
  answer says it. Other methods raise `Trouble`.
- Methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcheck.core.live.exchange import Answer, Counters, Sending, Served
from kvcheck.core.live.http import Http


class Trouble(Exception):
    """A call that is no request of a model failed. The text says the call and the server's answer, in one line."""


class Client(Protocol):
    """One server of one engine.

    counted: kind of evidence (KINDS of base.evidence_kinds) -> metrics that count it; the first that exists wins.
    computed: "request" and "token" -> metrics that count what the engine itself has finished, of everybody.
    said: kinds that this engine says of each request. flags: kind -> what to change in the server's flags to see it.
    has_salts: whether a request with a salt of its own shares no cached prefix with others.
    """

    engine: str
    has_salts: bool
    counted: Mapping[str, tuple[str, ...]]
    computed: Mapping[str, tuple[str, ...]]
    said: frozenset[str]
    flags: Mapping[str, str]

    def served(self) -> Served:
        """What the server says of itself. Raises Trouble."""

    def ask(self, sending: Sending) -> Answer:
        """Send a request and wait for its answer, or abort it as the sending says."""

    def counters(self) -> Counters | None:
        """All counters of all metrics addresses; None where the server has none. Raises Trouble."""

    def is_alive(self) -> bool:
        """Whether the server answers its health call."""

    def retract(self) -> None:
        """Make the engine retract or preempt all running requests, and go on. Raises Trouble where it cannot."""

    def flush(self) -> None:
        """Empty the prefix cache. Raises Trouble where it cannot, for instance while requests run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How a server is reached. metrics: addresses of its counters, summed; none: its own. token_of: the id of a word of
    the model's tokenizer, None for another word: for engines that answer in text."""

    server: Http
    metrics: tuple[Http, ...] = ()
    token_of: Callable[[str], int | None]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine. make: its client. is_at: whether it is what answers; raises CallFailed where nothing answers."""

    make: Callable[[Reach], Client]
    is_at: Callable[[Http], bool]
