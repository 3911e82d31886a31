"""Suspects of a wrong token of a known-answer model: pages of layers that explain it, as rows of a table.

Invariants:
- A record comes from a file: missing, damaged or too large fields give no row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.report.wording import clip

MOST_SUSPECTS = 12
MOST_LAYERS = 192
MOST_POSITIONS = 1 << 24
WHY_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """read: position read by the wrong step in that layer, if known."""

    where: str
    read: str
    why: str


def suspects_of(minimal: Mapping[str, object] | None) -> tuple[list[Suspect], int]:
    """Return the first MOST_SUSPECTS rows of a finding and the number of others."""
    if minimal is None or minimal.get("test") not in ("walk", "position"):
        return [], 0
    given, wrong = minimal.get("suspects"), minimal.get("wrong")
    reads = wrong if isinstance(wrong, list) else []
    rows = [found for row in (given if isinstance(given, list) else []) if (found := _suspect(row, reads)) is not None]
    return rows[:MOST_SUSPECTS], max(0, len(rows) - MOST_SUSPECTS)


def _suspect(row: object, reads: list[object]) -> Suspect | None:
    if not isinstance(row, dict):
        return None
    layer, page, head = _number(row.get("layer"), MOST_LAYERS - 1), _number(row.get("page")), _number(row.get("head"))
    first, last = _number(row.get("first")), _number(row.get("last"))
    if layer is None or page is None or first is None or last is None or last < first:
        return None
    read, why = _number(reads[layer]) if layer < len(reads) else None, row.get("why")
    of_head = "" if head is None else f", KV head {head}"
    return Suspect(
        where=f"layer {layer}{of_head}, page {page} (positions {first:,} to {last:,})",
        read="n/a" if read is None else f"{read:,}",
        why=clip(why, WHY_CHARS) if isinstance(why, str) else "",
    )


def _number(value: object, most: int = MOST_POSITIONS) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None
