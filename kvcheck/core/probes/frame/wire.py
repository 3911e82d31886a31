"""Wire between kvcheck and the child that holds an engine: one JSON object a line.

Nothing is unpickled. A line of no known form, down to the type of each key, is a ValueError.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO, Protocol

from kvcheck.core.base.record import Evidence, Finding, to_plain, value_from
from kvcheck.core.base.rng import Rng

LONGEST_LINE = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """The child is ready. version: as the engine reports it; recorded only.

    folder: of its package, or None. files: digest of the package's files. commit: of its working tree, or None. absent:
    cells that this release has dropped, with the reason.
    """

    engine: str
    version: str
    python: str
    torch: str
    device: str
    folder: str | None
    files: str | None
    commit: str | None
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The installed engine in one line, equal for equal engines."""
        parts = (f"{self.engine} {self.version}", self.commit and f"commit {self.commit}", self.files)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One schedule. traced: files or folders of the package whose lines are noted, relative to it; "" is all."""

    probe: str
    subject: str
    seed: int
    schedule: int
    traced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The result of a schedule. unknown: why it is no evidence, or None. stubs: stand-in modules served so far.
    lines: that ran in traced files, as ranges."""

    findings: tuple[Finding, ...] = ()
    evidence: Evidence
    unknown: str | None = None
    notes: tuple[str, ...] = ()
    stubs: tuple[str, ...] = ()
    lines: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    reason: str


Message = Hello | Ask | Reply | Refusal
_KINDS: dict[str, type[Message]] = {"hello": Hello, "ask": Ask, "reply": Reply, "refusal": Refusal}


def encode(message: Message) -> str:
    return json.dumps({type(message).__name__.lower(): to_plain(message)})


def decode(line: str) -> Message:
    raw = json.loads(line)
    if not isinstance(raw, dict) or len(raw) != 1:
        raise ValueError("expected an object with one key")
    ((name, body),) = raw.items()
    if name not in _KINDS:
        raise ValueError(f"expected one of {', '.join(_KINDS)}, got {name[:40]!r}")
    message: Message = value_from(_KINDS[name], body, name)
    return message


class Server(Protocol):
    def start(self) -> Hello | Refusal: ...

    def answer(self, ask: Ask) -> Reply: ...


def serve(server: Server, asks: Iterable[str], answers: IO[str]) -> None:
    greeting = server.start()
    print(encode(greeting), file=answers, flush=True)
    if isinstance(greeting, Refusal):
        return
    for line in asks:
        ask = decode(line)
        assert isinstance(ask, Ask)
        print(encode(server.answer(ask)), file=answers, flush=True)


def draws_of(ask: Ask) -> Rng:
    seed = Rng(ask.seed * 1_000_003 + ask.schedule).next_u64()
    return Rng(seed ^ zlib.crc32(f"{ask.probe}/{ask.subject}".encode()))
