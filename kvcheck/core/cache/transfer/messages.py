"""Messages between the two ends: small typed values, sent as JSON.

Invariants:
- A message of an older generation belongs to an earlier attempt.
- Nothing in a message is executed or unpickled, and every value is checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace

from kvcheck.core.base.errors import TransferError

ROOMS = 1 << 64
INDICES = 1 << 63
"""Page numbers, slots, lengths and requests are signed 64-bit numbers."""
MAX_MESSAGE_BYTES = 1 << 20
MAX_ROW_BYTES = 1 << 16
"""Longest metadata row; the largest hidden states in use take half of it."""

Runs = tuple[tuple[str, int, tuple[int, ...]], ...]
"""By leg and space: (leg, first logical page, physical pages)."""


# decode -> prefill   Want       pages, slot and generation of a room: you may write there
# prefill -> decode   Status     everything of the room was written, or why it was not
# decode -> prefill   Done       the bytes were verified, or given up: you may reuse your pages
# either -> other     Abort      the room ends; from the decode end it requests a Drained
# prefill -> decode   Drained    nothing will be written for that room any more
@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    room: int
    attempt: int  # failed attempts before, by the router's count
    generation: int
    request: int
    tokens: int  # of the prompt
    slot: int  # of the metadata
    state_slot: int  # 0 if there is none
    runs: Runs  # (leg and space, first logical page, physical pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    room: int
    generation: int
    is_ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    room: int
    generation: int
    is_ok: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    room: int
    attempt: int
    generation: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    room: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxData:
    """A metadata row in hexadecimal: the aux path over a socket."""

    room: int
    generation: int
    slot: int
    row: str


Message = Want | Status | Done | Abort | Drained | AuxData

_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (Want, Status, Done, Abort, Drained, AuxData)}


def encode(message: Message) -> bytes:
    return json.dumps([type(message).__name__, asdict(message)], separators=(",", ":")).encode()


def decode(data: bytes) -> Message:
    """Raise TransferError for anything but a message."""
    if len(data) > MAX_MESSAGE_BYTES:
        raise TransferError(f"message: expected at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    try:
        kind, values = json.loads(data.decode("utf-8"))
        made = _KINDS[kind](**values)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise TransferError(f"message: expected one of {', '.join(_KINDS)}, got {data[:60]!r}") from error
    for field in fields(made):
        what, is_right = _CHECKS[field.name]
        if not is_right(value := getattr(made, field.name)):
            raise TransferError(f"message {kind}: expected {what} in {field.name}, got {value!r:.60}")
    return replace(made, runs=_tuples(made.runs)) if isinstance(made, Want) else made


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < ROOMS


def _is_index(value: object) -> bool:
    return type(value) is int and 0 <= value < INDICES


def _is_flag(value: object) -> bool:
    return type(value) is bool


def _is_text(value: object) -> bool:
    """True for text that can be encoded again. Half of a surrogate pair cannot."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def _is_row(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 2 * MAX_ROW_BYTES and _ROW.fullmatch(value) is not None


def _is_runs(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(run, list) and len(run) == 3 and _is_run(*run) for run in value)


def _is_run(leg: object, first: object, pages: object) -> bool:
    return _is_text(leg) and _is_index(first) and isinstance(pages, list) and all(map(_is_index, pages))


def _tuples(runs: Runs) -> Runs:
    return tuple((leg, first, tuple(pages)) for leg, first, pages in runs)


_ROW = re.compile("(?:[0-9a-f]{2})*")
_NUMBER = ("a number from 0 to 2**64 - 1", _is_number)
_INDEX = ("a number from 0 to 2**63 - 1", _is_index)
_TEXT = ("text", _is_text)
_CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "room": _NUMBER,
    "attempt": _INDEX,
    "generation": _NUMBER,
    "request": _INDEX,
    "tokens": _INDEX,
    "slot": _INDEX,
    "state_slot": _INDEX,
    "is_ok": ("true or false", _is_flag),
    "reason": _TEXT,
    "row": (f"at most {MAX_ROW_BYTES} bytes in lower-case hexadecimal", _is_row),
    "runs": ("[leg, first page, pages] rows with page numbers from 0 to 2**63 - 1", _is_runs),
}
