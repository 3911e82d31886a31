"""RowJudge: compares rows of the user's pool with their owners' content and identifies wrong bytes.

Invariants:
- Each buffer, layer and rule yields one finding, which counts the wrong rows.
- Floating-point elements are finite and normal, so a copy through a wider type keeps them, also if integer rows of two
  bytes and more are viewed as floating point.
- A row is attributed to a request only if all its bytes match; a short row can match several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from kvcheck.core.base.content import Site
from kvcheck.core.base.record import Finding
from kvcheck.core.probes.frame.content import content
from kvcheck.testing.buffers import Buffer

__tracebackhide__ = True

TELLING = 8
"""Bytes of a row that suffice to identify the place that it was written for."""

PADDING = 0
DUMPED = 16
"""Bytes of a row in a finding."""


@dataclass(frozen=True, slots=True)
class WrongRow:
    """First wrong row of several. code: kind of the bytes. story: their description, printed after "holds". position:
    that of the owner whose bytes they are, if there is one only."""

    code: str
    story: str
    at: int
    rows: int
    seen_request: int | None
    minimal: dict[str, object]
    position: int | None = None


@dataclass(slots=True)
class RowJudge:
    ownership: Ownership
    buffers: Sequence[Buffer]
    words: dict[str, int] = field(default_factory=dict)
    reads: int = 0
    findings: list[Finding] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """Calls of the user's functions so far, each with its ids, so that they can be repeated in a debugger."""
    early: str = ""
    """Text on work of load that had not run when it returned."""

    def compare(self, held: Buffer, ids: Sequence[int], seen: torch.Tensor, wanted: torch.Tensor) -> WrongRow | None:
        """Count and compare rows, [ids, bytes] each. Return the first difference."""
        self.count(held.name, seen.numel(), len(ids))
        return self.differs(held, ids, seen, wanted)

    def differs(self, held: Buffer, ids: Sequence[int], seen: torch.Tensor, wanted: torch.Tensor) -> WrongRow | None:
        wrong = torch.nonzero((seen != wanted).any(1)).view(-1)
        if not len(wrong):
            return None
        at = int(wrong[0])
        return self._wrong(held, seen[at], wanted[at], self.ownership.owners[held.unit, ids[at]], at, len(wrong))

    def count(self, name: str, size: int, reads: int) -> None:
        self.reads += reads
        self.words[name] = self.words.get(name, 0) + -(-size // 8)

    def find(
        self,
        code: str,
        oracle: str,
        message: str,
        held: Buffer | None,
        wrong: WrongRow | None = None,
        *,
        call: str | None = None,
        **more: object,
    ) -> None:
        place = {} if held is None else {"buffer": held.name, "layer": held.layer}
        called = "; ".join([*self.calls, *([] if call is None else [call])])
        minimal = {"called": called, **({} if wrong is None else wrong.minimal)}
        fields = {**place, "seen_request": wrong and wrong.seen_request, "minimal": minimal, **more}
        self.findings.append(Finding(code=code, oracle=oracle, message=message, tier="device", **fields))  # type: ignore[arg-type]

    def _wrong(
        self, held: Buffer, seen: torch.Tensor, wanted: torch.Tensor, owner: Owner, at: int, rows: int
    ) -> WrongRow:
        first = int(torch.nonzero(seen != wanted)[0])
        minimal: dict[str, object] = {"seen": dump(seen, first), "wanted": dump(wanted, first)}
        holders = self.ownership.owners_of(held, seen)
        code, story, request = self._story(held, seen, owner)
        return WrongRow(code, story, at, rows, request, minimal, holders[0].position if len(holders) == 1 else None)

    def _story(self, held: Buffer, row: torch.Tensor, owner: Owner) -> tuple[str, str, int | None]:
        holders = self.ownership.owners_of(held, row)
        if holders and all(holder.request == owner.request for holder in holders):
            return "KV301", f"the row of its position {_some(holders)}", owner.request
        if holders:
            requests = dict.fromkeys(holder.request for holder in holders)
            if len(requests) > 1:
                return "KV102", f"bytes of {_named(requests, 'or')}, which its few bytes cannot tell apart", None
            number = holders[0].request
            if number == PADDING:
                return "KV102", f"the bytes of padding, its row {_some(holders)}", None
            return "KV102", f"request {number}'s bytes (its position {_some(holders)})", number
        place = self.ownership.buffer_of(held, row, self.buffers) if len(row) >= TELLING else None
        if place is not None:
            other, holder = place
            story = f"the row of {_named([holder.request], '')}, position {holder.position}, of {other.where}"
            return "KV106", story, holder.request
        among = self.ownership.owners_in(held, row)
        foreign = [request for request in among if request != owner.request]
        if foreign:
            return "KV103", f"a torn row with words of {_named(among, 'and')}", foreign[0]
        if among:
            return "KV103", "its own row in part, and bytes that nobody wrote", owner.request
        if not bool(row.any()):
            return "KV104", "zeros, which nobody wrote there", None
        return "KV105", "bytes that nobody wrote", None


def _some(holders: Sequence[Owner]) -> str:
    return " or ".join(str(holder.position) for holder in holders)


def _named(requests: Iterable[int], word: str) -> str:
    return f" {word} ".join("padding" if request == PADDING else f"request {request}" for request in requests)


@dataclass(frozen=True, slots=True)
class Owner:
    request: int
    position: int


@dataclass(slots=True)
class Ownership:
    """Current owners of rows, (unit, id) -> owner. everybody: all owners so far."""

    owners: dict[tuple[str, int], Owner] = field(default_factory=dict)
    everybody: dict[tuple[str, Owner], None] = field(default_factory=dict)

    def give(self, unit: str, request: int, ids: Sequence[int]) -> None:
        """Make a request the owner of rows, position by position, without writing."""
        for at, number in enumerate(ids):
            self.owners[unit, number] = Owner(request, at)
            self.everybody[unit, Owner(request, at)] = None

    def write(self, buffers: Sequence[Buffer], unit: str, request: int, ids: Sequence[int]) -> None:
        self.give(unit, request, ids)
        for held in buffers:
            if held.unit == unit and ids:
                held.write(ids, rows_of(held, request, range(len(ids))))

    def wanted(self, held: Buffer, ids: Sequence[int]) -> torch.Tensor:
        mine = [self.owners[held.unit, number] for number in ids]
        return _rows(held, mine)

    def owners_of(self, held: Buffer, row: torch.Tensor) -> tuple[Owner, ...]:
        known = [owner for unit, owner in self.everybody if unit == held.unit]
        hits = torch.nonzero((_rows(held, known) == row).all(1)).view(-1).tolist()
        return tuple(known[hit] for hit in hits)

    def owners_in(self, held: Buffer, row: torch.Tensor) -> tuple[int, ...]:
        whole = len(row) // 8 * 8
        if not whole:
            return ()
        known = [owner for unit, owner in self.everybody if unit == held.unit]
        words = _rows(held, known)[:, :whole].contiguous().view(torch.int64)
        hits = (words == row[:whole].contiguous().view(torch.int64)).any(1)
        return tuple(dict.fromkeys(owner.request for owner, hit in zip(known, hits.tolist(), strict=True) if hit))

    def buffer_of(self, held: Buffer, row: torch.Tensor, others: Sequence[Buffer]) -> tuple[Buffer, Owner] | None:
        for other in others:
            if other.key != held.key and other.size == held.size and len(found := self.owners_of(other, row)) == 1:
                return other, found[0]
        return None


def rows_of(held: Buffer, request: int, positions: Sequence[int]) -> torch.Tensor:
    """Return a request's content in whole rows: [positions, bytes] uint8."""
    site = Site(held.unit, held.name, "", -1 if held.layer is None else held.layer)
    rows = content(site, request, positions, held.width)
    if held.dtype is torch.bool:
        return rows & 1
    is_float = held.dtype.is_floating_point or held.dtype.is_complex
    if not is_float and held.width == 1:
        return rows  # all eight bits, since they are all that tells owners apart
    width = held.rows.element_size() if is_float else 1
    top = rows[:, width - 1 :: width]  # sign and the upper bits of the exponent; any byte can be one of those
    # 01 in the two upper bits of the exponent: neither all ones (NaN, infinity) nor all zeros (zero, subnormal).
    top.bitwise_and_(0x9F).bitwise_or_(0x20)
    return rows


def dump(row: torch.Tensor, first: int) -> str:
    start = first // 8 * 8
    shown = row[start : start + DUMPED].tolist()
    return f"{' '.join(f'{byte:02x}' for byte in shown)} (byte {start} of {len(row)} on)"


def _rows(held: Buffer, owners: Sequence[Owner]) -> torch.Tensor:
    found = torch.empty(len(owners), held.size, dtype=torch.uint8)
    for request in dict.fromkeys(owner.request for owner in owners):
        at = [place for place, owner in enumerate(owners) if owner.request == request]
        found[at] = held.kept(rows_of(held, request, [owners[place].position for place in at]))
    return found
