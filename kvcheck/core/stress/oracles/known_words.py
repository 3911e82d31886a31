"""KnownWords: base of the oracles that decode words, by the places, requests and room marks of a history."""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.base.deviation import Deviation, Elsewhere, Expectation, Owners, classify, origin_of
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.workload.events import Expected, Forward, RoomMarked, SitesKnown
from kvcheck.core.stress.workload.mismatch import Mismatch

POSITIONS = 4096
"""Positions tried for a 32-bit word, and for words of other places; a longer request raises it to its own position."""


class KnownWords:
    def __init__(self) -> None:
        self._requests = 1
        self._positions = POSITIONS
        self._rows: dict[tuple[str, str, str], RowSites] = {}
        self._marks: dict[int, None] = {}
        self._half_marks: dict[int, None] = {}

    def known(self) -> Iterable[tuple[type, Handler]]:
        return (
            (SitesKnown, self._sites_known),
            (Forward, self._forward),
            (Expected, self._expected),
            (RoomMarked, self._room_marked),
        )

    def deviation(self, found: Mismatch) -> Deviation:
        self._requests = max(self._requests, found.request, found.author)
        is_metadata = found.space == "metadata"
        words: tuple[int | None, ...] = found.words
        if is_metadata:  # a field is filled from the front; the words behind its last one are empty
            used = max((at for at, word in enumerate(words, 1) if word), default=len(words))
            words = words[:used]
        poison = content.POISON_HALF if found.half else content.POISON_WORD
        marks = self._half_marks if found.half else self._marks
        return classify(
            words,
            Site(found.space, found.buffer, found.piece, found.layer, found.first_word),
            Expectation(
                request=found.request,
                author=found.author,
                position=found.position,
                is_state=found.space == "state",
            ),
            Owners(
                requests=self._requests if found.half else self._most(),
                unwritten=(poison, *marks, 0) if is_metadata else (poison, *marks),
                positions=max(POSITIONS, found.position + 1) if found.half else None,
                elsewhere=self._elsewhere(found.position),
            ),
        )

    def whose(self, words: tuple[int, ...], site: Site, nobody: str) -> tuple[Tag | None, str]:
        """Return the first tag in the words, and a description of them; `nobody` if there is none. Words without a tag
        here are tried at the other places of the run."""
        tags = (content.decode(word, site, at, requests=self._most()) for at, word in enumerate(words))
        if (tag := next((tag for tag in tags if tag is not None), None)) is not None:
            where = "" if site.space == "metadata" else f" (its position {tag.position})"
            return tag, f"request {tag.request}'s bytes{where}"
        elsewhere = self._elsewhere(0)
        origin = None if elsewhere is None else origin_of(dict(enumerate(words)), elsewhere)
        return (None, nobody) if origin is None else (origin.tag, f"words of {origin.story(site)}")

    def _sites_known(self, event: SitesKnown) -> None:
        self._rows |= {(row.space, row.buffer, row.piece): row for row in event.rows}

    def _forward(self, event: Forward) -> None:
        self._positions = max(self._positions, event.stop)

    def _expected(self, event: Expected) -> None:
        self._requests = max(self._requests, event.request)

    def _room_marked(self, event: RoomMarked) -> None:
        self._marks[event.word] = None
        for half in (event.word & 0xFFFFFFFF, (event.word >> 32) & 0xFFFFFFFF):
            self._half_marks[half - (1 << 32) if half >> 31 else half] = None

    def _elsewhere(self, position: int) -> Elsewhere | None:
        if not self._rows:
            return None
        positions = max(self._positions, position + 1)
        return Elsewhere(rows=(*self._rows.values(),), requests=self._requests, positions=positions)

    def _most(self) -> int:
        """The highest request that a 64-bit word is decoded to; its tag is unambiguous."""
        return max(self._requests, 1 << 20)


def place_of(found: Mismatch) -> str:
    """The place of a differing row: "k, layer 1, page 7, row 0 (and 3 more rows)"."""
    if found.space == "metadata":
        return found.buffer
    unit = "slot" if found.space == "state" else "page"
    more = f" (and {found.count - 1} more rows)" if found.count > 1 else ""
    piece = f".{found.piece}" if found.piece else ""
    return f"{found.buffer}{piece}, layer {found.layer}, {unit} {found.page}, row {found.row}{more}"
