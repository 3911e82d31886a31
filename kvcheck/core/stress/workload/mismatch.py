"""Mismatch: a row that differs from its expected words. It holds no tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mismatch:
    """words: those seen, signed. half: True if words have 32 bits. layer: global id. page: physical page or slot. row:
    token within the page. position: logical token. author: the request of the expected word. count: deviating rows of
    this read. tier: "device", or "host" or "storage" for a row read after it arrived there. first_word: as in Site."""

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
