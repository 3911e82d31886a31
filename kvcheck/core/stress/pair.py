"""Pair: two unordered operations of a run that touch one place, as a value and as the text of a line.

    459.hicache.load~472.decode.read      operation 459 is held until operation 472 has run

Text and value round-trip.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvcheck.core.base.errors import UsageError

_PAIR = re.compile(r"([1-9][0-9]{0,11})\.([^~]{1,80})~([1-9][0-9]{0,11})\.([^~]{1,80})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """held: number of the operation that runs late; it was submitted first. Names are checked too."""

    held: int
    held_name: str
    until: int
    until_name: str

    def text(self) -> str:
        return f"{self.held}.{self.held_name}~{self.until}.{self.until_name}"


def parse_pair(text: str) -> Pair:
    """Parse a pair. Raises UsageError."""
    found = _PAIR.fullmatch(text)
    if found is None or int(found[1]) >= int(found[3]):
        raise UsageError(
            f"strategy=flip: expected choices=NUMBER.NAME~NUMBER.NAME, the lower number first, got {text[:80]!r}; "
            "copy the whole line"
        )
    return Pair(held=int(found[1]), held_name=found[2], until=int(found[3]), until_name=found[4])
