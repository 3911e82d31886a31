"""Ownership: the content that is written to each row of the user's pool, and the owner of a row that is read.

Invariants:
- Floating-point elements are finite and normal, so a copy through a wider type keeps them, also if integer rows of two
  bytes and more are viewed as floating point.
- A row is attributed to a request only if all its bytes match; a short row can match several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvcheck.core.base.content import Site
from kvcheck.core.probes.frame.content import content
from kvcheck.testing.buffers import Buffer

__tracebackhide__ = True

PADDING = 0
DUMPED = 16
"""Bytes of a row in a finding."""


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
