"""Messages between the two ends: small, typed, and readable by nobody but the field names they state.

    decode -> prefill   Want       pages, slot and generation of a room: you may write there
    prefill -> decode   Status     everything of the room was written, or why it was not
    decode -> prefill   Done       the bytes were verified, or given up: you may reuse your pages
    either -> other     Abort      the room ends; from the decode end it asks for a Drained
    prefill -> decode   Drained    nothing will be written for that room any more

Invariants:
- A message names its room and generation; what names an older generation is about somebody else.
- A message is plain values; nothing in it is executed, unpickled or trusted without a check.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from kvcheck.core.errors import TransferError

ROOMS = 1 << 64
MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """Where a decode rank wants a room. runs: by leg and space, (first logical page, physical pages).

    tokens: prompt tokens that the pages cover. slot: of the metadata. state_slot: of the recurrent state, 0 without.
    """

    room: int
    generation: int
    request: int
    tokens: int
    slot: int
    state_slot: int
    runs: tuple[tuple[str, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The prefill rank has written everything (ok), or has given up (reason)."""

    room: int
    generation: int
    is_ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The decode rank has verified the room (ok), or given it up after everything was reported."""

    room: int
    generation: int
    is_ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """The room ends."""

    room: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """Nothing will be written for the room's generation any more."""

    room: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxData:
    """A metadata row as bytes, in hexadecimal: the aux path over a socket."""

    room: int
    generation: int
    slot: int
    row: str


Message = Want | Status | Done | Abort | Drained | AuxData

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Want, Status, Done, Abort, Drained, AuxData)}


def encode(message: Message) -> bytes:
    """One message as UTF-8 JSON."""
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """The message of `data`. Raises TransferError for anything else."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransferError(f"message: expected at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    try:
        kind, values = json.loads(data.decode("utf-8"))
        made = _KINDS[kind](**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransferError(f"message: expected one of {', '.join(_KINDS)}, got {data[:60]!r}") from error
    if isinstance(made, Want):
        runs = _runs(made.runs)
        made = Want(**{**asdict(made), "runs": runs})
    for name, kind_of in (("room", int), ("generation", int)):
        value = getattr(made, name)
        if type(value) is not kind_of or not 0 <= value < ROOMS:
            raise TransferError(f"message {kind}: expected {name} from 0 to 2**64 - 1, got {value!r:.40}")
    return made


def _runs(value: object) -> tuple[tuple[str, int, tuple[int, ...]], ...]:
    if not isinstance(value, (list, tuple)):
        raise TransferError(f"message Want: expected runs, got {value!r:.60}")
    runs = []
    for run in value:
        if not (isinstance(run, (list, tuple)) and len(run) == 3 and isinstance(run[0], str)):
            raise TransferError(f"message Want: expected [leg, first, pages], got {run!r:.60}")
        leg, first, pages = run
        ids = (first, *pages) if isinstance(pages, (list, tuple)) else (None,)
        if not all(type(each) is int and each >= 0 for each in ids):
            raise TransferError(f"message Want: expected page numbers of at least 0 in {leg!r:.20}, got {pages!r:.60}")
        runs.append((leg, first, tuple(pages)))
    return tuple(runs)
