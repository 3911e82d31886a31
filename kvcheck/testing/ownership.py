"""Ownership: what is written to a row of the user's pool, and whose row it is that is read.

The bytes of a row are those that the content rule gives to (buffer, layer, request, position), cut to what it can hold.

Invariants:
- Elements of a floating type are finite, normal and no NaN: a copy by way of a wider type keeps them. So are those of
  integers of two bytes and more a row, whatever floating type their bytes are viewed as.
- A row is attributed to a request only if all of it is that request's content. A row of few bytes can be that of
  several, and is then attributed to all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvcheck.core.base.content import Site
from kvcheck.core.probes.frame.content import content
from kvcheck.testing.buffers import Buffer

PADDING = 0
"""The owner of rows of padding: nobody's request."""
DUMPED = 16
"""Bytes of a row that a finding shows."""


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose row it is, and which of its positions."""

    request: int
    position: int


@dataclass(slots=True)
class Ownership:
    """Who owns which row, as it was given last: (unit, id) -> owner. everybody: all owners that there ever were."""

    owners: dict[tuple[str, int], Owner] = field(default_factory=dict)
    everybody: dict[tuple[str, Owner], None] = field(default_factory=dict)

    def give(self, unit: str, request: int, ids: Sequence[int]) -> None:
        """Make the request the owner of these rows, position by position, and write nothing."""
        for at, number in enumerate(ids):
            self.owners[unit, number] = Owner(request, at)
            self.everybody[unit, Owner(request, at)] = None

    def write(self, buffers: Sequence[Buffer], unit: str, request: int, ids: Sequence[int]) -> None:
        """Make the request the owner of these rows, and write its content to every buffer with this unit."""
        self.give(unit, request, ids)
        for held in buffers:
            if held.unit == unit and ids:
                held.write(ids, rows_of(held, request, range(len(ids))))

    def wanted(self, held: Buffer, ids: Sequence[int]) -> torch.Tensor:
        """The content of whoever owns these rows."""
        mine = [self.owners[held.unit, number] for number in ids]
        return _rows(held, mine)

    def owners_of(self, held: Buffer, row: torch.Tensor) -> tuple[Owner, ...]:
        """The owners whose content the row is: one at most, unless a row has too few bytes to tell them apart."""
        known = [owner for unit, owner in self.everybody if unit == held.unit]
        hits = torch.nonzero((_rows(held, known) == row).all(1)).view(-1).tolist()
        return tuple(known[hit] for hit in hits)

    def owners_in(self, held: Buffer, row: torch.Tensor) -> tuple[int, ...]:
        """The requests whose content has an aligned word of 8 bytes of the row at its place."""
        whole = len(row) // 8 * 8
        if not whole:
            return ()
        known = [owner for unit, owner in self.everybody if unit == held.unit]
        words = _rows(held, known)[:, :whole].contiguous().view(torch.int64)
        hits = (words == row[:whole].contiguous().view(torch.int64)).any(1)
        return tuple(dict.fromkeys(owner.request for owner, hit in zip(known, hits.tolist(), strict=True) if hit))

    def buffer_of(self, held: Buffer, row: torch.Tensor, others: Sequence[Buffer]) -> tuple[Buffer, Owner] | None:
        """The other buffer or layer whose content the row is, and whose."""
        for other in others:
            if other.key != held.key and other.size == held.size and len(found := self.owners_of(other, row)) == 1:
                return other, found[0]
        return None


def rows_of(held: Buffer, request: int, positions: Sequence[int]) -> torch.Tensor:
    """The content of a request in whole rows of a buffer: [positions, bytes] uint8."""
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
    """Some bytes of a row in hexadecimal, from the word with byte `first` on."""
    start = first // 8 * 8
    shown = row[start : start + DUMPED].tolist()
    return f"{' '.join(f'{byte:02x}' for byte in shown)} (byte {start} of {len(row)} on)"


def _rows(held: Buffer, owners: Sequence[Owner]) -> torch.Tensor:
    found = torch.empty(len(owners), held.size, dtype=torch.uint8)
    for request in dict.fromkeys(owner.request for owner in owners):
        at = [place for place, owner in enumerate(owners) if owner.request == request]
        found[at] = held.kept(rows_of(held, request, [owners[place].position for place in at]))
    return found
