"""The content oracle: every word that a request reads is its own, at its position; a finding names the real owner.

Invariants:
- Foreign (KV102), position (KV301), torn (KV103), never written (KV104), misplaced (KV106) and bit difference (KV105)
  are told apart by decoding the words, not by where they were read.
- Places come from the history (SitesKnown). A history that names none is judged without KV106.
- Page and slot 0 have no owner: words found there were written without owning them (KV403).
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.base import content
from kvcheck.core.base.content import RowSites, Site, Tag
from kvcheck.core.base.deviation import Deviation, Elsewhere, Expectation, Owners, classify, origin_of
from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS
from kvcheck.core.workload.events import Expected, Forward, Leased, Padding, ProcessActs, Saw, SitesKnown, Verified
from kvcheck.core.workload.mismatch import Mismatch

POSITIONS = 4096
"""Positions tried for a 32-bit word, and for words of other places; a longer request raises it to its own position."""


class ContentOracle:
    """Every KV, state and metadata word a request reads was written for it, at that position, in that buffer."""

    name = "content"

    def __init__(self) -> None:
        self.judged = 0
        self.findings: list[Finding] = []
        self._requests = 1
        self._positions = POSITIONS
        self._rows: dict[tuple[str, str, str], RowSites] = {}
        self._process = ""
        self._seen: set[tuple[object, ...]] = set()

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (SitesKnown, self._sites_known),
            (Forward, self._forward),
            (Verified, self._verified),
            (Saw, self._saw),
            (Leased, self._leased),
            (Padding, self._padding),
            (Expected, self._expected),
            (ProcessActs, self._process_acts),
        )

    def finish(self) -> None:
        """Nothing is left to judge."""

    def _process_acts(self, event: ProcessActs) -> None:
        self._process = event.process

    def _sites_known(self, event: SitesKnown) -> None:
        self._rows |= {(row.space, row.buffer, row.piece): row for row in event.rows}

    def _forward(self, event: Forward) -> None:
        self._positions = max(self._positions, event.stop)

    def _expected(self, event: Expected) -> None:
        self._requests = max(self._requests, event.request)

    def _verified(self, event: Verified) -> None:
        self.judged += event.words

    def _saw(self, event: Saw) -> None:
        found = event.mismatch
        key = (self._process, found.tier, found.request, found.buffer, found.layer, found.page)
        if len(self.findings) >= MAX_FINDINGS or key in self._seen:
            return
        self._seen.add(key)
        self._requests = max(self._requests, found.request, found.author)
        deviation = self._deviation(found)
        rank = f"{self._process}: " if self._process else ""
        self.findings.append(
            Finding(
                code=deviation.code,
                oracle=self.name,
                tier=found.tier,
                buffer=found.buffer,
                layer=None if found.space == "metadata" else found.layer,
                page=None if found.space == "metadata" else found.page,
                row=None if found.space == "metadata" else found.row,
                request=found.request,
                seen_request=deviation.owner,
                message=f"{rank}{_seen(found, deviation.story)}; {_wanted(found)}",
            )
        )

    def _leased(self, event: Leased) -> None:
        self.judged += 1
        for name, words in event.residue:
            if len(self.findings) >= MAX_FINDINGS or ("lease", event.space, name) in self._seen:
                return
            self._seen.add(("lease", event.space, name))
            tag, whose = self._whose(
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

    def _padding(self, event: Padding) -> None:
        self.judged += 1
        if not event.words:
            return
        tag, whose = self._whose(event.words, Site(event.space, event.buffer, event.piece, event.layer), "other bytes")
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

    def _deviation(self, found: Mismatch) -> Deviation:
        is_metadata = found.space == "metadata"
        words: tuple[int | None, ...] = found.words
        if is_metadata:  # a field is filled from the front; the words behind its last one are empty
            used = max((at for at, word in enumerate(words, 1) if word), default=len(words))
            words = words[:used]
        poison = content.POISON_HALF if found.half else content.POISON_WORD
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
                unwritten=(poison, 0) if is_metadata else (poison,),
                positions=max(POSITIONS, found.position + 1) if found.half else None,
                elsewhere=self._elsewhere(found.position),
            ),
        )

    def _whose(self, words: tuple[int, ...], site: Site, nobody: str) -> tuple[Tag | None, str]:
        """The tag of the first word that carries one, and what the words are; `nobody` where none does.

        Words that carry none here are tried at the other places of the run.
        """
        tags = (content.decode(word, site, at, requests=self._most()) for at, word in enumerate(words))
        if (tag := next((tag for tag in tags if tag is not None), None)) is not None:
            where = "" if site.space == "metadata" else f" (its position {tag.position})"
            return tag, f"request {tag.request}'s bytes{where}"
        elsewhere = self._elsewhere(0)
        origin = None if elsewhere is None else origin_of(dict(enumerate(words)), elsewhere)
        return (None, nobody) if origin is None else (origin.tag, f"words of {origin.story(site)}")

    def _elsewhere(self, position: int) -> Elsewhere | None:
        """The other places of the run; None where the history names none."""
        if not self._rows:
            return None
        positions = max(self._positions, position + 1)
        return Elsewhere(rows=(*self._rows.values(),), requests=self._requests, positions=positions)

    def _most(self) -> int:
        """The highest request that a 64-bit word is decoded to; its tag cannot be mistaken."""
        return max(self._requests, 1 << 20)


def _seen(found: Mismatch, story: str) -> str:
    if found.tier == "device":
        return f"request {found.request} read {_where(found)} and saw {story}"
    moved = "a backup" if found.tier == "host" else "a fetch from the store"
    whose = f"request {found.request}'s" if found.request else "an unknown"
    return f"{moved} of {whose} page left {_where(found)} on the host with {story}"


def _where(found: Mismatch) -> str:
    if found.space == "metadata":
        return f"its {found.buffer}"
    unit = "slot" if found.space == "state" else "page"
    more = f" (and {found.count - 1} more rows)" if found.count > 1 else ""
    piece = f".{found.piece}" if found.piece else ""
    return f"{found.buffer}{piece}, layer {found.layer}, {unit} {found.page}, row {found.row}{more}"


def _wanted(found: Mismatch) -> str:
    if found.space == "metadata":
        return "expected what its own prefill handed over"
    if found.position < 0:
        return "expected an empty state: the request has computed nothing yet"
    whose = "its own" if found.author == found.request else f"the shared prefix's (written by request {found.author})"
    return f"expected {whose} position {found.position}"
