"""Words of a row beside the expected ones, each with its request and position, decoded by the content rule."""

from __future__ import annotations

from kvcheck.core.base import content
from kvcheck.core.base.content import Site, Tag
from kvcheck.core.base.story import MOST_WORDS, Word
from kvcheck.core.stress.workload.mismatch import Mismatch

POSITIONS = 4096
"""Positions that are tried for a word of 32 bits; a longer request raises it to its own position."""
TRIED = 64
"""Requests to try for a word of 32 bits: it carries half a tag, so each takes a search."""


def row_text(found: Mismatch) -> str:
    """Place and reader of the row: "index_k_with_scale.key, layer 0, page 6, row 0, read for request 25"."""
    piece = f".{found.piece}" if found.piece and found.piece not in found.buffer else ""
    if found.space == "metadata":
        return f"{found.buffer}, slot {found.page}, read for request {found.request}"
    unit = "slot" if found.space == "state" else "page"
    whose = f"of request {found.request} on the host" if found.tier == "host" else f"read for request {found.request}"
    return f"{found.buffer}{piece}, layer {found.layer}, {unit} {found.page}, row {found.row}, {whose}"


def words_of(found: Mismatch, requests: int) -> tuple[Word, ...]:
    """The first words of a differing row. requests: the highest number of a request in the run."""
    return tuple(_word(found, at, requests) for at in range(min(MOST_WORDS, len(found.words))))


def _word(found: Mismatch, at: int, requests: int) -> Word:
    seen = found.words[at]
    wanted = _wanted(found, at)
    belongs = "not known" if wanted is None else f"request {found.author}, position {found.position}"
    if wanted == 0:
        belongs = "an empty state"
    return Word(
        index=at,
        seen=_hex(seen, found.half),
        seen_says="as wanted" if seen == wanted else _said(says(found, at, requests)),
        wanted=None if wanted is None else _hex(wanted, found.half),
        wanted_says=belongs,
    )


def _wanted(found: Mismatch, at: int) -> int | None:
    """None for metadata, whose fields are values, and for an unknown author."""
    if found.space == "metadata" or not found.author:
        return None
    if found.position < 0:
        return 0
    whole = content.word(Tag(found.author, 0, found.position), _site(found), at)
    return _half(whole) if found.half else whole


def says(found: Mismatch, at: int, requests: int) -> Tag | str:
    """The tag of a word, or a description if it has no owner."""
    site, seen = _site(found), found.words[at]
    if seen == (content.POISON_HALF if found.half else content.POISON_WORD):
        return "never written"
    if seen == 0:
        return "empty"
    if found.half:
        near = tuple(dict.fromkeys(each for each in (found.request, found.author) if each))
        positions = max(POSITIONS, found.position + 1)
        tag = content.decode_half(seen, site, at, requests=min(requests, TRIED), positions=positions, first=near)
    else:
        tag = content.decode(seen, site, at, requests=max(requests, 1 << 20))
    return "no word of this place" if tag is None else tag


def _said(tag: Tag | str) -> str:
    return tag if isinstance(tag, str) else f"request {tag.request}, position {tag.position}"


def _site(found: Mismatch) -> Site:
    return Site(found.space, found.buffer, found.piece, found.layer, found.first_word)


def _hex(word: int, half: bool) -> str:
    digits = 8 if half else 16
    return f"{word & ((1 << 4 * digits) - 1):0{digits}x}"


def _half(word: int) -> int:
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low
