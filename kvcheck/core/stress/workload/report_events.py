"""Events of the reports of schedulers and engines, complete and in the order of their end."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sent:
    """A request was handed to every end of the engine. attempt: how often it was sent before."""

    request: int
    attempt: int
    prompt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reported:
    """One end's report of a round, by request. end: "prefill", "decode", or "" for an engine that does both."""

    end: str
    admitted: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    retracted: tuple[int, ...] = ()
    resumed: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EvictionsCounted:
    tier: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageEmitted:
    """A rank sends a message about a request. kind: its class. copies: how often it will arrive; 0: it is lost."""

    sender: str
    peer: str
    kind: str
    request: int
    generation: int
    copies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Sizes of an engine process. max_prefilling: admitted requests that have not joined. units: by space."""

    process: str
    page_size: int
    max_prefilling: int
    units: tuple[tuple[str, int], ...]


ReportEvent = Sent | Reported | EvictionsCounted | MessageEmitted | Sized
