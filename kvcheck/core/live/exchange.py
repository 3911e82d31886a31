"""Requests and answers of a server as values, the same for every engine.

Invariants:
- A field that an engine does not report is None, never 0.
- A failed answer keeps the tokens that arrived before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Tier(Enum):
    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. number: of the run, from 0. ids: prompt tokens. expected: the right answer."""

    number: int
    ids: tuple[int, ...]
    expected: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortRequest:
    """after: answered tokens to wait for. by_call: by the engine's call, not by closing the connection."""

    after: int
    by_call: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Sending:
    """One sending of a question. rid: new for each. priority: larger is served first, on every engine. salt: requests
    of two salts share no cached prefix; None: the shared cache. top: log-probabilities for each answered token.
    is_timed: stream the answer to time its tokens, without fields that cost server time."""

    question: Question
    rid: str
    priority: int | None = None
    abort: AbortRequest | None = None
    salt: str | None = None
    top: int = 0
    is_timed: bool = False


class End(Enum):
    """The end of an exchange, as records name it."""

    DONE = "done"
    """The engine reported the end: all requested tokens, or fewer with a reason."""
    ABORTED = "aborted"
    """The client closed the connection, or the engine reported an abort."""
    REFUSED = "refused"
    """An HTTP status of 400 or more, or an error object in its place."""
    CUT = "cut"
    """The connection ended inside an answer."""
    UNREADABLE = "unreadable"
    """The answer is not in the engine's format, such as text that is no JSON."""
    SILENT = "silent"
    """No byte came within the time limit."""
    UNREACHED = "unreached"
    """The server took no connection, or closed it without a byte of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One answer. logprobs: of `tokens`, in nats. top: the most likely tokens of each step with their
    log-probabilities. cached: prompt tokens that the engine reports as not computed. rid: if derived from the one sent.
    after_abort: tokens 10 s and more after the abort was acknowledged. first_s, last_s: of the first and last event
    with tokens, on the clock of began_s and ended_s; first_tokens: tokens in the first. None without a stream."""

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
    first_s: float | None = None
    last_s: float | None = None
    first_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    sending: Sending
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """longest: tokens of a request and its answer. pool: tokens of its device tier. page: tokens of a page. mode:
    "prefill" or "decode" for one half of a pair. bootstrap: (host, port) of a prefill server's rooms. facts: further
    fields for the record."""

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
