"""The content oracle: every word that a request reads is its own, at its position; a finding names the real owner.

Invariants:
- Foreign (KV102), position (KV301), torn (KV103), never written (KV104), misplaced (KV106; only with SitesKnown in the
  history) and bit difference (KV105) are distinguished by decoding the words.
- A failed room may be half written. Only another request's bytes in it are a finding: its memory was freed during a
  transfer.
- Page and slot 0 have no owner: words found there were written without owning them (KV403).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.base.deviation import Deviation, Elsewhere, Expectation, Owners, classify, origin_of
from kvcheck.core.base.record import Finding
from kvcheck.core.cache.events import RoomMarked
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS, Oracle
from kvcheck.core.stress.workload.events import (
    Expected,
    Forward,
    Leased,
    Padding,
    ProcessActs,
    RoomDrained,
    Saw,
    SitesKnown,
    Verified,
)
from kvcheck.core.stress.workload.mismatch import Mismatch

POSITIONS = 4096
"""Positions tried for a 32-bit word, and for words of other places; a longer request raises it to its own position."""


class KnownWords(Oracle):
    def __init__(self) -> None:
        super().__init__()
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
    if found.space == "metadata":
        return found.buffer
    unit = "slot" if found.space == "state" else "page"
    more = f" (and {found.count - 1} more rows)" if found.count > 1 else ""
    piece = f".{found.piece}" if found.piece else ""
    return f"{found.buffer}{piece}, layer {found.layer}, {unit} {found.page}, row {found.row}{more}"


class ContentOracle(KnownWords):
    name = "content"

    def __init__(self) -> None:
        super().__init__()
        self._process = ""
        self._seen: set[tuple[object, ...]] = set()

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            *self.known(),
            (Verified, self._verified),
            (Saw, self._saw),
            (Leased, self._leased),
            (RoomDrained, self._room_drained),
            (Padding, self._padding),
            (ProcessActs, self._process_acts),
        )

    def _process_acts(self, event: ProcessActs) -> None:
        self._process = event.process

    def _verified(self, event: Verified) -> None:
        self.judged += event.words

    def _saw(self, event: Saw) -> None:
        found = event.mismatch
        key = (self._process, found.tier, found.request, found.buffer, found.layer, found.page)
        if len(self.findings) >= MAX_FINDINGS or key in self._seen:
            return
        self._seen.add(key)
        deviation = self.deviation(found)
        rank = f"{self._process}: " if self._process else ""
        self._add(found, deviation, f"{rank}{_seen(found, deviation.story)}; {_wanted(found)}")

    def _add(self, found: Mismatch, deviation: Deviation, message: str) -> None:
        is_row = found.space == "metadata"
        self.findings.append(
            Finding(
                code=deviation.code,
                oracle=self.name,
                tier=found.tier,
                buffer=found.buffer,
                layer=None if is_row else found.layer,
                page=None if is_row else found.page,
                row=None if is_row else found.row,
                request=found.request,
                seen_request=deviation.owner,
                message=message,
            )
        )

    def _leased(self, event: Leased) -> None:
        self.judged += 1
        for name, words in event.residue:
            if len(self.findings) >= MAX_FINDINGS or ("lease", event.space, name) in self._seen:
                return
            self._seen.add(("lease", event.space, name))
            tag, whose = self.whose(
                words[:1], Site("metadata", f"metadata.{name}", name, 0), "an earlier owner's bytes"
            )
            self.findings.append(
                Finding(
                    code="KV102",
                    oracle=self.name,
                    tier="device",
                    buffer=f"metadata.{name}",
                    page=event.slot,
                    request=event.request,
                    seen_request=tag.request if tag is not None else None,
                    message=f"{event.space} slot {event.slot} was handed to request {event.request} with {whose} "
                    f"in {name}; a slot must be empty when it changes hands",
                )
            )

    def _room_drained(self, event: RoomDrained) -> None:
        self.judged += event.words
        for found in event.rows:
            deviation = self.deviation(found)
            key = (event.rank, "drained", found.request, found.buffer, found.layer, found.page)
            if deviation.code != "KV102" or len(self.findings) >= MAX_FINDINGS or key in self._seen:
                continue
            self._seen.add(key)
            text = f"{event.rank}: the room of request {found.request} failed, and {place_of(found)} holds "
            text += f"{deviation.story}; expected its own words or none: memory was given away while a transfer still "
            self._add(found, deviation, f"{text}read or wrote it")

    def _padding(self, event: Padding) -> None:
        self.judged += 1
        if not event.words:
            return
        tag, whose = self.whose(event.words, Site(event.space, event.buffer, event.piece, event.layer), "other bytes")
        unit = "slot" if event.space == "state" else "page"
        self.findings.append(
            Finding(
                code="KV403",
                oracle=self.name,
                tier="device",
                buffer=event.buffer,
                layer=event.layer,
                page=0,
                row=event.row,
                request=tag.request if tag is not None else None,
                message=f"{event.buffer}, layer {event.layer}, {unit} 0, row {event.row} holds {whose} after the run; "
                f"{unit} 0 is padding, which no operation may write",
            )
        )


def _seen(found: Mismatch, story: str) -> str:
    if found.tier == "device":
        return f"request {found.request} read {_where(found)} and saw {story}"
    moved = "a backup" if found.tier == "host" else "a fetch from the store"
    whose = f"request {found.request}'s" if found.request else "a"
    return f"{moved} of {whose} page left {_where(found)} on the host with {story}"


def _where(found: Mismatch) -> str:
    return f"its {found.buffer}" if found.space == "metadata" else place_of(found)


def _wanted(found: Mismatch) -> str:
    if found.space == "metadata":
        return "expected what its own prefill handed over"
    if not found.request:
        return "expected words of a request that has computed this prefix, and none has"
    if found.position < 0:
        return "expected an empty state: the request has computed nothing yet"
    whose = "its own" if found.author == found.request else f"the shared prefix's (written by request {found.author})"
    return f"expected {whose} position {found.position}"
