"""The verdict on a row that differs: the owner, position and place of the words that it holds.

Invariants:
- Words are decoded at their own place first, then at every other place that the caller names: another head or word of
  the row, layer, buffer, piece or space.
- A word is attributed to another place only if a second one agrees, or if it is the only 64-bit word to attribute.
- 32-bit words carry half a tag: at other places they are tried for the reader and the author alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.base.content import RowSites, Site, Tag, codes, decode, decode_half, mask
from kvcheck.kernels.content import as_unsigned, low_half, unmix64_torch

TRIED_WORDS = 8
"""Words of a row that are looked up at other places; the rest are compared with the row found for these."""
ROW_WORDS = 1 << 16
"""Most words of a row that are tried, from its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """The expected row: the words that `author` wrote for `position`. request: the reader, author or sharer.

    is_state: the row is a recurrent state and position counts its tokens; -1: no token has been computed.
    """

    request: int
    author: int
    position: int
    is_state: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """The other places of a run, and the largest tags there."""

    rows: Sequence[RowSites]
    requests: int
    positions: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The possible writers of a row: requests 1 to `requests`, or none (words `unwritten`).

    positions: to try for 32-bit words; None for 64-bit words. has_others: there are writers whose words do not follow
    the rule. elsewhere: None if other places are unknown.
    """

    requests: int
    unwritten: tuple[int, ...]
    positions: int | None = None
    has_others: bool = False
    elsewhere: Elsewhere | None = None


@dataclass(frozen=True, slots=True)
class Deviation:
    """The found content. owner: the request whose words the row holds. story: follows "saw" or "holds"."""

    code: str
    owner: int | None
    story: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The place that words of a row were written for.

    first: index of the first of them as read. shift: added to that, the index in the whole row there. words: their
    number.
    """

    row: RowSites
    layer: int
    first: int
    shift: int
    tag: Tag
    words: int

    def story(self, site: Site) -> str:
        """Describe the words, for a row that lies at `site`: "layer 0 of request 3, position 5"."""
        row, place = self.row, []
        is_same_buffer = (row.space, row.buffer, row.piece) == (site.space, site.buffer, site.piece)
        if not is_same_buffer and row.space == "metadata":
            place.append(f"field {row.piece}")
        elif not is_same_buffer:
            place += [f"space {row.space}"] if row.space != site.space else []
            place.append(f"buffer {row.buffer}{row.piece and '.'}{row.piece}")
        if self.layer != site.layer and row.space != "metadata":
            place.append(f"layer {self.layer}")
        if is_same_buffer and (moved := self.shift - site.first_word):
            per_head, index = row.words // row.heads, self.first + self.shift
            is_head = row.heads > 1 and moved % per_head == 0
            place.append(f"head {index // per_head}" if is_head else f"word {index} and those behind it")
        return f"{', '.join(place)} of request {self.tag.request}, position {self.tag.position}"


def classify(words: Sequence[int | None], site: Site, expected: Expectation, owners: Owners) -> Deviation:
    """Classify a row that differs. words: as read, signed; None for a word that was not read."""
    read = {at: word for at, word in enumerate(words) if word is not None}
    if read and all(word in owners.unwritten for word in read.values()):
        return Deviation("KV104", None, "memory that was never written")
    tags = {at: _tag(word, site, at, expected, owners) for at, word in read.items()}
    known = [tag for tag in tags.values() if tag is not None]
    odd = {at: word for at, word in read.items() if tags[at] is None}
    is_own = set(known) == {Tag(expected.author, 0, expected.position)}
    if (is_own or not known) and (misplaced := _misplaced(odd, len(read), site, expected, owners)) is not None:
        return misplaced
    if not known:
        first = f" (first: {as_unsigned(next(iter(read.values()))):#018x})" if read else ""
        return Deviation("KV105", None, f"words that nobody writes there{first}")
    if is_own:
        if not odd:
            return Deviation("KV105", None, "its own row, which ends in other bytes")
        if not owners.has_others and not any(word in owners.unwritten for word in odd.values()):
            return Deviation("KV105", None, f"its own row with {len(odd)} words that nobody writes there")
    own = (expected.author, expected.request)
    if odd or len(set(known)) > 1:
        found = sorted({tag.request for tag in known})
        foreign = [owner for owner in found if owner not in own]
        return Deviation("KV103", foreign[0] if foreign else found[0], _torn(known, len(odd)))
    tag = known[0]
    if tag.request not in own:
        return Deviation("KV102", tag.request, f"request {tag.request}'s bytes (its position {tag.position})")
    if expected.is_state and (tag.position < expected.position or expected.position < 0):
        return Deviation("KV101", tag.request, f"its own state as of token {tag.position}")
    whose = "its own" if tag.request != expected.author else "the"  # the reader's bytes, at a place of a shared prefix
    return Deviation("KV301", tag.request, f"{whose} bytes of position {tag.position}")


def _torn(known: Sequence[Tag], odd: int) -> str:
    parts = []
    for request in sorted({tag.request for tag in known}):
        positions = sorted({tag.position for tag in known if tag.request == request})
        parts.append(f"request {request} (position {' and '.join(map(str, positions))})")
    more = f" and {odd} words of nobody" if odd else ""
    return f"a torn row with words of {' and '.join(parts)}{more}"


def origin_of(words: Mapping[int, int], elsewhere: Elsewhere, *, halves_of: Sequence[int] = ()) -> Origin | None:
    """Return the place that most of a row's words were written for; None if too few agree on one.

    words: by their index in the row. halves_of: requests to try, if words have 32 bits.
    """
    seen: dict[tuple[int, int, int, Tag], None] = {}
    for at, word in list(words.items())[:TRIED_WORDS]:
        hits = _half_hits(word, elsewhere, halves_of) if halves_of else _hits(word, elsewhere)
        seen |= dict.fromkeys((number, layer, index - at, tag) for number, layer, index, tag in hits)
    found = [_agreeing(words, elsewhere.rows[number], layer, shift, tag) for number, layer, shift, tag in seen]
    best = max(found, key=lambda origin: origin.words, default=None)
    return None if best is None or (best.words < 2 and (halves_of or len(words) > 1)) else best


def _agreeing(words: Mapping[int, int], row: RowSites, layer: int, shift: int, tag: Tag) -> Origin:
    masks = mask(row.site(layer), min(row.words, ROW_WORDS))
    written = codes(np.array([tag.request]), np.array([tag.position])) ^ masks
    values = (low_half(written) if row.is_half else written).tolist()
    agree = [at for at, word in words.items() if 0 <= at + shift < len(values) and values[at + shift] == word]
    return Origin(row=row, layer=layer, first=agree[0], shift=shift, tag=tag, words=len(agree))


def _misplaced(
    odd: Mapping[int, int], read: int, site: Site, expected: Expectation, owners: Owners
) -> Deviation | None:
    if owners.elsewhere is None:
        return None
    words = {at: word for at, word in odd.items() if word not in owners.unwritten}
    halves_of = () if owners.positions is None else tuple(dict.fromkeys((expected.author, expected.request)))
    origin = origin_of(words, owners.elsewhere, halves_of=halves_of)
    if origin is None:
        return None
    story = origin.story(site)
    if origin.words == read:
        return Deviation("KV106", origin.tag.request, f"the words of {story}")
    of_row = f"{origin.words} of the {read} words read"
    if len(odd) < read:
        return Deviation("KV106", origin.tag.request, f"its own row with words of {story} ({of_row})")
    return Deviation("KV106", origin.tag.request, f"words of {story} ({of_row})")


def _hits(word: int, elsewhere: Elsewhere) -> Iterator[tuple[int, int, int, Tag]]:
    """Row, layer, index in the whole row, and tag."""
    for number, row in enumerate(elsewhere.rows):
        for layer in () if row.is_half else row.layers:
            packed = unmix64_torch(mask(row.site(layer), min(row.words, ROW_WORDS)) ^ word)
            request, position = (packed >> 40) & 0xFFFFFF, packed & 0xFFFFFFFF
            is_tag = (request >= 1) & (request <= elsewhere.requests) & (position < elsewhere.positions)
            for index in torch.nonzero(is_tag & ((packed >> 32) & 0xFF == 0)).view(-1).tolist():
                yield number, layer, index, Tag(int(request[index]), 0, int(position[index]))


def _half_hits(word: int, elsewhere: Elsewhere, requests: Sequence[int]) -> Iterator[tuple[int, int, int, Tag]]:
    at = np.arange(elsewhere.positions, dtype=np.int64)
    for number, row in enumerate(elsewhere.rows):
        for layer in row.layers if row.is_half else ():
            masks = mask(row.site(layer), min(row.words, ROW_WORDS))
            for request in requests:
                written = low_half(codes(np.full(len(at), request, dtype=np.int64), at).unsqueeze(-1) ^ masks)
                for position, index in torch.nonzero(written == word).tolist():
                    yield number, layer, index, Tag(request, 0, position)


def _tag(value: int, site: Site, index: int, expected: Expectation, owners: Owners) -> Tag | None:
    if owners.positions is None:
        return decode(value, site, index, requests=owners.requests)
    likely = (expected.author, expected.request)  # 32 bits do not name one for sure
    return decode_half(value, site, index, requests=owners.requests, positions=owners.positions, first=likely)
