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

from kvcheck.core.base.content import Site
from kvcheck.core.base.deviation import Deviation
from kvcheck.core.base.record import Finding
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.known_words import KnownWords, place_of
from kvcheck.core.stress.oracles.oracle import MAX_FINDINGS
from kvcheck.core.stress.workload.events import Leased, Padding, ProcessActs, RoomDrained, Saw, Verified
from kvcheck.core.stress.workload.mismatch import Mismatch


class ContentOracle(KnownWords):
    name = "content"

    def __init__(self) -> None:
        super().__init__()
        self.judged = 0
        self.findings: list[Finding] = []
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

    def finish(self) -> None:
        """Nothing is left to judge."""

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
