"""Mismatch: a row that a read found to differ, with what was seen there.

Invariants:
- It holds no tensors, so it can be stored, sent and judged anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """A row that a read found to differ. words: what was seen, signed. half: True if words have 32 bits.

    layer: global layer id. page: physical page or slot. row: token within the page. position: logical token.
    author: the request whose word belongs there. count: deviating rows of this read, this one included. tier: "device",
    or "host" or "storage" for a row that was looked at after it had arrived there. first_word: as in Site.
    """

    request: int
    space: str
    buffer: str
    piece: str
    layer: int
    page: int
    row: int
    position: int
    author: int
    words: tuple[int, ...]
    half: bool
    count: int
    tier: str = "device"
    first_word: int = 0
