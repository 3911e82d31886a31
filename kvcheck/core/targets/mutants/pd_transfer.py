"""Bugs c and e put back, piece by piece: lists trimmed or broadcast, success before the bytes, ranks on their own.

Invariants:
- Each subclass removes one line of the fix and restates nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvcheck.core.backend.backend import Signal
from kvcheck.core.errors import TargetError
from kvcheck.core.paging import IndexArray
from kvcheck.core.scheduler.agreement import RankGroup
from kvcheck.core.scheduler.decode import Arrivals, DecodeScheduler
from kvcheck.core.scheduler.request import Active
from kvcheck.core.targets.mutants.mutant import Mutant
from kvcheck.core.targets.parts import FIXED
from kvcheck.core.transfer.blocks import PageRun
from kvcheck.core.transfer.messages import Want
from kvcheck.core.transfer.receiver import SUCCESS, Receiver, Receiving
from kvcheck.core.transfer.sealing import Sealer
from kvcheck.core.transfer.sender import Sender, Sending
from kvcheck.core.transfer.writer import Writer


def _by_place(source: PageRun, target: PageRun, needed: range) -> tuple[IndexArray, IndexArray]:
    """Both lists from their own beginnings, as far as they go."""
    return source.pages[max(0, needed.start - source.first) :][: len(needed)], target.pages[: len(needed) + 1]


class TrimsOneSide(Sender):
    """A shorter source list is cut to the target's length, which changes nothing; a longer one is left alone."""

    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        if len(mine) < len(theirs):
            mine = mine[: len(theirs)]
            theirs = theirs[: len(mine)]
        elif len(theirs) and len(mine) > len(theirs):  # the run is written whole, over what lies behind
            theirs = theirs[0] + np.arange(len(mine), dtype=np.int64)
        return np.stack((mine[: len(theirs)], theirs), axis=1)


class TrimsTail(Sender):
    """The longer list loses its tail."""

    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        shorter = min(len(mine), len(theirs))
        return np.stack((mine[:shorter], theirs[:shorter]), axis=1)


class Broadcasts(Sender):
    """Unequal lists are broadcast against each other, as array arithmetic does with a list of one."""

    def _pair(self, source: PageRun, target: PageRun, *, needed: range, what: str) -> IndexArray:
        if "state" not in what:
            return super()._pair(source, target, needed=needed, what=what)
        mine, theirs = _by_place(source, target, needed)
        longer = max(len(mine), len(theirs)) if len(mine) and len(theirs) else 0
        return np.stack((np.resize(mine, longer), np.resize(theirs, longer)), axis=1)


class TrimChangesRequest(Sender):
    """The longer list is cut in place: the request forgets pages that it holds."""

    def _state_pairs(self, sending: Sending, want: Want) -> dict[str, IndexArray]:
        assert sending.holding is not None
        length = len(self._run(want, "state", "full").pages)
        if 0 < length < len(sending.holding.pages):
            sending.holding.pages = sending.holding.pages[:length]
        return super()._state_pairs(sending, want)


class StateResultIgnored(Sender):
    """What the engine says about the state write is not looked at."""

    def _send_state(
        self, sending: Sending, want: Want, peer: str, pairs: Mapping[str, IndexArray], after: Sequence[Signal]
    ) -> None:
        try:
            super()._send_state(sending, want, peer, pairs, after)
        except TargetError:
            return


class OwnStrideWriter(Writer):
    """Slots of the peer are found with this end's own stride."""

    def _stride(self, peer: str) -> int:
        return self._layout.row_bytes


class OwnStride(Sender):
    """A sender with that writer."""

    writer_type = OwnStrideWriter


class SealWithoutKV(Sealer):
    """The seal covers state and metadata."""

    legs = ("state", "aux")


class SealWithoutState(Sealer):
    """The seal covers KV and metadata."""

    legs = ("kv", "aux")


class SealWithoutAux(Sealer):
    """The seal covers KV and state."""

    legs = ("kv", "state")


class RoomAlone(Receiver):
    """A row whose room is not zero counts as arrived."""

    def _is_sealed(self, peer: str, receiving: Receiving) -> bool:
        return bool(self._metadata.row_view(receiving.slot)[-64:].any()) or self.sources[peer].rank != self._row_sender


class OldSeal(Receiver):
    """Any whole seal in the slot counts, and slots keep theirs when they change hands."""

    def _is_sealed(self, peer: str, receiving: Receiving) -> bool:
        return bool(self._seals[receiving.slot * self._ranks + self.sources[peer].rank].any())

    def _clear_seals(self, rows: IndexArray) -> None:
        if len(rows) == len(self._seals):
            super()._clear_seals(rows)


class FailedOverwritten(Receiver):
    """A status table in which a failure is a status like any other."""

    def _is_open(self, receiving: Receiving) -> bool:
        return receiving.status != SUCCESS


class DrainedAtOnce(Receiver):
    """Memory of a failed room is given back without waiting for who may still write it."""

    def is_drained(self, room: int) -> bool:
        """Nobody is asked."""
        self._rooms[room].writers.clear()
        return True


class PagesAtOnce(Arrivals):
    """A failed request's pages are free at once; its slot waits."""

    def abort(self, active: Active) -> None:
        """The pages go first."""
        super().abort(active)
        self._parts.pool.close(active.holding)

    def _end(self, active: Active, reason: str) -> None:
        super()._end(active, reason)
        self._parts.pool.close(active.holding)


class PagesFreedEarly(DecodeScheduler):
    """Only the metadata slot waits for the drain."""

    hand_over_type = PagesAtOnce

    def _give_back(self, active: Active) -> None:
        self.parts.decode_metadata.release(active.target_slot, active.request)


class DecidesAlone(RankGroup):
    """Every rank goes by its own poll."""

    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """Nothing is reduced."""
        return [list(values) for values in known]


_C = "SGLang #18727 and #23323 (state index lists of different lengths)"
_E = "SGLang #23252 and #26394 (intra-node NVLink)"

PD_TRANSFER: tuple[Mutant, ...] = (
    Mutant(
        name="align-trims-one-side",
        bug="c",
        parts=replace(FIXED, sender=TrimsOneSide),
        scenario="pd-transfer",
        shape="glm-5.1-tiny",
        killed_by="protocol",
        code="KV301",
        shows="A source list shorter than the target's is 'trimmed' to the target's length; a longer one is not.",
        matters="The run is written whole: it ends in the next page of the decode pool, which is another request's.",
        example=f"{_C}: the trim that changed nothing.",
    ),
    Mutant(
        name="align-trims-tail",
        bug="c",
        parts=replace(FIXED, sender=TrimsTail),
        scenario="pd-transfer",
        shape="glm-5.1-tiny",
        killed_by="protocol",
        code="KV301",
        shows="The longer of two state lists loses its tail, with a warning.",
        matters="The last index pages are never written, and windows that start on different pages are paired wrongly.",
        example=f"{_C}: the fix that was merged.",
    ),
    Mutant(
        name="align-broadcasts",
        bug="c",
        parts=replace(FIXED, sender=Broadcasts),
        scenario="pd-transfer",
        shape="gpt-oss-tiny",
        killed_by="protocol",
        code="KV301",
        shows="Two lists of unequal lengths are broadcast against each other.",
        matters="One page is written over several, or several over one; nothing says so.",
        example=f"{_C}: array arithmetic on lists of 1 and n pages.",
    ),
    Mutant(
        name="trim-changes-request",
        bug="c",
        parts=replace(FIXED, sender=TrimChangesRequest),
        scenario="pd-transfer",
        shape="glm-5.1-tiny",
        killed_by="accounting",
        code="KV401",
        shows="The trim cuts the request's own list of pages.",
        matters="What was cut off is never freed, and the request's later chunks miss it.",
        example="SGLang's transfer worker shortened the chunk's indices in place, for the destinations after it too.",
    ),
    Mutant(
        name="state-result-ignored",
        bug="c",
        parts=replace(FIXED, sender=StateResultIgnored),
        scenario="pd-transfer",
        shape="glm-5.1-tiny",
        killed_by="protocol",
        code="KV301",
        shows="A state write fails, and the sender reports success.",
        matters="Without a seal the request decodes with somebody else's state; with one it waits till it is late.",
        example="SGLang before 0.5.17 ignored what the extra transfer returned.",
    ),
    Mutant(
        name="aux-stride-of-the-sender",
        bug="e",
        parts=replace(FIXED, sender=OwnStride),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV901",
        shows="The place of a metadata slot at the peer is computed with the sender's own stride.",
        matters="Rows land in other requests' slots as soon as the two ends are padded differently.",
        example="SGLang's RDMA path multiplies the peer's slot by its own item length.",
    ),
    Mutant(
        name="seal-without-kv",
        bug="e",
        parts=replace(FIXED, sealer=SealWithoutKV),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV203",
        shows="Success waits for state and metadata, and not for the KV pages.",
        matters="The first decode step attends to whatever the pages held before.",
        example=f"{_E}: nothing proves that KV has landed.",
    ),
    Mutant(
        name="seal-without-state",
        bug="e",
        parts=replace(FIXED, sealer=SealWithoutState),
        scenario="nvlink-aux",
        shape="glm-5.1-tiny",
        killed_by="protocol",
        code="KV203",
        shows="Success waits for KV and metadata, and not for index pages or recurrent states.",
        matters="The indexer ranks tokens by another request's keys.",
        example=f"{_E}: state bytes have no gate at all.",
    ),
    Mutant(
        name="seal-without-aux",
        bug="e",
        parts=replace(FIXED, sealer=SealWithoutAux),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV203",
        shows="Success waits for KV and state, and not for the metadata row.",
        matters="The first token, its log-probabilities and the draft seed are the slot's previous owner's, or zero.",
        example=f"{_E}: 'done' arrived before the metadata.",
    ),
    Mutant(
        name="room-alone-is-checked",
        bug="e",
        parts=replace(FIXED, receiver=RoomAlone),
        scenario="nvlink-aux",
        shape="gpt-oss-tiny",
        killed_by="protocol",
        code="KV203",
        shows="A room number in the slot counts as proof that everything is there.",
        matters="One of ten fields has landed; the other nine, the KV and the state may not have.",
        example=f"{_E}: the gate of 0.5.13.",
    ),
    Mutant(
        name="old-seal-believed",
        bug="e",
        parts=replace(FIXED, receiver=OldSeal),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV203",
        shows="A slot keeps the seal of its previous request, and any seal counts.",
        matters="A request joins the batch with the bytes of the one before it.",
        example=f"{_E}: a slot kept its previous room.",
    ),
    Mutant(
        name="failed-overwritten",
        bug="e",
        parts=replace(FIXED, receiver=FailedOverwritten),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV602",
        shows="A room that failed can become anything again.",
        matters="Its pages may have been given away by then.",
        example="SGLang's status table kept the larger number, and Failed is 0.",
    ),
    Mutant(
        name="slot-freed-before-drain",
        bug="e",
        parts=replace(FIXED, receiver=DrainedAtOnce),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="ordering",
        code="KV202",
        shows="Slot and pages of an aborted room are given back while the sender may still write them.",
        matters="A late write lands in the next request's slot.",
        example="SGLang before 0.5.19 had no deferred release.",
    ),
    Mutant(
        name="pages-freed-before-drain",
        bug="e",
        parts=replace(FIXED, decode_scheduler=PagesFreedEarly),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="ordering",
        code="KV202",
        shows="Pages that were advertised to a sender are given back before it has drained; the slot waits.",
        matters="KV of an aborted request lands in the pages of a running one.",
        example="SGLang before 0.5.19 had no deferred release.",
    ),
    Mutant(
        name="rank-decides-alone",
        bug="e",
        parts=replace(FIXED, group=DecidesAlone),
        scenario="nvlink-aux",
        shape="llama-3-tiny",
        killed_by="protocol",
        code="KV601",
        shows="A rank commits a request because its own poll says Success.",
        matters="Queues of ranks differ from then on; the next reduction pairs one request's status with another.",
        example=f"{_E}: some ranks kept a request that others had taken.",
    ),
)
