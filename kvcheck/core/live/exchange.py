"""What is sent to a server and what comes back, as values: the same for every engine.

Invariants:
- What an engine does not say is None, never 0.
- An answer that is no answer says why, in `end` and `reason`; it holds the tokens that arrived before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Tier(Enum):
    """Where cached tokens of a prompt were found; the values are those of records."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. number: of the run, from 0. ids: tokens to send. expected: all that a right server answers."""

    number: int
    ids: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """That a request is to be aborted. after: answered tokens to wait for first. by_call: the engine's call for it
    instead of closing the connection, where the engine has one."""

    after: int
    by_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """How a question is sent. rid: the name of the request at the server, new for each sending. priority: larger is
    served first, for every engine; None says nothing of it. salt: requests of two salts share no cached prefix; None:
    the cache that requests without one share. top: log-probabilities that are asked for beside each answered token's.
    """

    question: Question
    rid: str
    priority: int | None = None
    abort: Abort | None = None
    salt: str | None = None
    top: int = 0


class End(Enum):
    """How an exchange ended; the values are those of records."""

    DONE = "done"
    """The engine answered to the end, by what it says: all tokens that were asked for, or fewer with a reason."""
    ABORTED = "aborted"
    """We closed the connection, or the engine says that it aborted the request."""
    REFUSED = "refused"
    """An HTTP status of 400 or more, or an error object in its place."""
    CUT = "cut"
    """The connection ended inside an answer."""
    UNREADABLE = "unreadable"
    """What came is not the engine's own format, such as text that is no JSON."""
    SILENT = "silent"
    """No byte came within the time limit."""
    UNREACHED = "unreached"
    """The server took no connection, or closed it without a byte of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came back.

    logprobs: of `tokens`, in nats, as long as they are. top: of each of `tokens`, the most likely tokens of that step
    with their log-probabilities, where they were asked for. cached: prompt tokens that the engine says it did not
    compute, in all; cached_by: by tier, where it says so. prompt_tokens: as the engine counts them. rid: the name under
    which the engine gives the answer, where that is made of the one that was sent. after_abort: tokens that arrived 10
    s and more after the engine had acknowledged the abort. began_s, ended_s: of one clock.
    """

    end: End
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] | None = None
    top: tuple[Mapping[int, float], ...] | None = None
    cached: int | None = None
    cached_by: Mapping[Tier, int] | None = None
    retractions: int | None = None
    prompt_tokens: int | None = None
    finish: str | None = None
    rid: str | None = None
    after_abort: int | None = None
    reason: str | None = None
    began_s: float = 0.0
    ended_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Exchange:
    """One sending with what came back."""

    sending: Sending
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a server says of itself.

    model: the name to ask by. longest: tokens of a request and its answer; pool: tokens that its device tier holds;
    page: tokens of a page. has_host_tier, has_storage, has_priorities: None where it does not say. mode: "prefill" or
    "decode" for one half of a pair. bootstrap: (host, port) of a prefill server's rooms. facts: what else is worth a
    place in a record.
    """

    engine: str
    version: str | None = None
    model: str | None = None
    longest: int | None = None
    pool: int | None = None
    page: int | None = None
    has_host_tier: bool | None = None
    has_storage: bool | None = None
    has_priorities: bool | None = None
    mode: str | None = None
    bootstrap: tuple[str, int] | None = None
    facts: Mapping[str, object] = field(default_factory=dict)


Counters = Mapping[str, float]
"""Metric name -> sum over its labels. A metric that the server does not have (yet) is absent."""
