"""Client: how one engine is asked, and what it can be made to do.

Invariants:
- A method blocks until the server answered or the time limit passed. `ask` never raises for what a server does: its
  answer says it. Other methods raise `Trouble`.
- Methods may be called from several threads at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvcheck.core.live.exchange import Answer, Counters, Sending, Served


class Trouble(Exception):
    """A call that is no request of a model failed. The text says the call and the server's answer, in one line."""


class Client(Protocol):
    """One server of one engine.

    counted: kind of evidence (see evidence.KINDS) -> names of the metrics whose sum counts it, first that exists wins.
    said: kinds that this engine says of each request. flags: kind -> what to change in the server's flags to see it.
    """

    engine: str
    counted: Mapping[str, tuple[str, ...]]
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
