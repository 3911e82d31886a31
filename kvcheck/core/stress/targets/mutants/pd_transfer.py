"""Bug e put back, piece by piece: success before the bytes, memory freed too early, ranks that do not agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.process_group import RankGroup
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.transfer.layout import BufferLayout
from kvcheck.core.cache.transfer.receiver import SUCCESS, InboundRoom, Receiver
from kvcheck.core.cache.transfer.seal import Content, Sealer, SealPlan
from kvcheck.core.cache.transfer.writer import Writer
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class OwnStride(Writer):
    def _stride(self, peer: str) -> int:
        return self._layout.row_bytes


class SealWithoutKV(Sealer):
    def _buffers(self, content: Content) -> list[BufferLayout]:
        return [each for each in super()._buffers(content) if each.leg != "kv"]


class SealWithoutState(Sealer):
    def _buffers(self, content: Content) -> list[BufferLayout]:
        return [each for each in super()._buffers(content) if each.leg != "state"]


class SealWithoutAux(Sealer):
    def plan(self, content: Content) -> SealPlan:
        return super().plan(replace(content, row=None))


class RoomAlone(Receiver):
    def _is_sealed(self, peer: str, receiving: InboundRoom) -> bool:
        return bool(self._metadata.row_view(receiving.slot)[-64:].any()) or self.sources[peer].rank != self._row_sender


class OldSeal(Receiver):
    def _is_sealed(self, peer: str, receiving: InboundRoom) -> bool:
        seal = self._found(peer, receiving)
        receiving.size += seal.bytes if seal is not None else 0
        return seal is not None

    def _clear_seals(self, rows: IndexArray) -> None:
        if len(rows) == len(self._seals):
            super()._clear_seals(rows)


class FailedOverwritten(Receiver):
    def _is_open(self, receiving: InboundRoom) -> bool:
        return receiving.status != SUCCESS


class GenerationKept(Receiver):
    def _next_generation(self, room: int) -> int:
        if not hasattr(self, "_kept"):
            self._kept: dict[int, int] = {}
        if room not in self._kept:
            self._kept[room] = super()._next_generation(room)
        return self._kept[room]


class AbortSaidOnce(Receiver):
    def _ask_again(self, receiving: InboundRoom) -> None:
        return


class DrainedAtOnce(Receiver):
    def is_drained(self, receiving: InboundRoom) -> bool:
        receiving.writers.clear()
        return True


class PagesFreedEarly(DecodeScheduler):
    def _end(self, active: RunningRequest, reason: str) -> None:
        super()._end(active, reason)
        self._pool.close(active.holding)

    def _give_back(self, active: RunningRequest) -> None:
        return


class DecidesAlone(RankGroup):
    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(values) for values in known]


_E = "SGLang #23252 and #26394 (intra-node NVLink)"

_mutant = partial(
    Mutant,
    bug="e",
    scenario="nvlink-aux",
    shape="llama-3-tiny",
    killed_by="protocol",
    code="KV203",
)
PD_TRANSFER: tuple[Mutant, ...] = (
    _mutant(
        name="aux-stride-of-the-sender",
        parts=replace(FIXED, writer=OwnStride),
        scenario="pd-transfer",
        code="KV604",
        shows="The place of a metadata slot at the peer is computed with the sender's own stride.",
        matters="Rows land in other requests' slots as soon as the two ends are padded differently.",
        example="SGLang's RDMA path multiplies the peer's slot by its own item length.",
    ),
    _mutant(
        name="seal-without-kv",
        parts=replace(FIXED, sealer=SealWithoutKV),
        shows="Success waits for state and metadata, and not for the KV pages.",
        matters="The first decode step attends to whatever the pages held before.",
        example=f"{_E}: nothing proves that KV has landed.",
    ),
    _mutant(
        name="seal-without-state",
        parts=replace(FIXED, sealer=SealWithoutState),
        shape="glm-5.1-tiny",
        shows="Success waits for KV and metadata, and not for index pages or recurrent states.",
        matters="The indexer ranks tokens by another request's keys.",
        example=f"{_E}: state bytes have no gate at all.",
    ),
    _mutant(
        name="seal-without-aux",
        parts=replace(FIXED, sealer=SealWithoutAux),
        shows="Success waits for KV and state, and not for the metadata row.",
        matters="The first token, its log-probabilities and the draft seed are the slot's previous owner's, or zero.",
        example=f"{_E}: 'done' arrived before the metadata.",
    ),
    _mutant(
        name="room-alone-is-checked",
        parts=replace(FIXED, receiver=RoomAlone),
        shape="gpt-oss-tiny",
        shows="A room number in the slot counts as proof that everything is there.",
        matters="One of ten fields has landed; the other nine, the KV and the state may not have.",
        example=f"{_E}: the gate of 0.5.13.",
    ),
    _mutant(
        name="old-seal-believed",
        parts=replace(FIXED, receiver=OldSeal),
        killed_by="transfers",
        code="KV606",
        shows="A slot keeps the seal of its previous request, and any seal counts.",
        matters="A request joins the batch with the bytes of the one before it.",
        example=f"{_E}: a slot kept its previous room.",
    ),
    _mutant(
        name="failed-overwritten",
        parts=replace(FIXED, receiver=FailedOverwritten),
        scenario="pd-transfer",
        code="KV602",
        shows="A room that has failed can change its status again.",
        matters="Its pages may belong to another request by then.",
        example="SGLang's status table kept the larger number, and Failed is 0.",
    ),
    _mutant(
        name="generation-kept",
        parts=replace(FIXED, receiver=GenerationKept),
        scenario="pd-transfer",
        code="KV602",
        shows="A request that is sent again in its room has the number of its first attempt.",
        matters="Messages of the first attempt count for the second, and the Want of the second is taken for a copy.",
        example="A room number alone names both attempts; SGLang's decode end has no other number.",
    ),
    _mutant(
        name="abort-said-once",
        parts=replace(FIXED, receiver=AbortSaidOnce),
        scenario="pd-transfer",
        killed_by="liveness",
        code="KV901",
        shows="A sender is asked once to stop writing a failed room; the request or its answer is lost.",
        matters="The pages and the slot of the room are never freed; each lost message takes more of them.",
        example="Sockets that reconnect lose control messages now and then, without a report.",
    ),
    _mutant(
        name="slot-freed-before-drain",
        parts=replace(FIXED, receiver=DrainedAtOnce),
        killed_by="ordering",
        code="KV202",
        shows="Slot and pages of an aborted room are freed while the sender may still write them.",
        matters="A late write lands in the next request's slot.",
        example="SGLang before 0.5.19 had no deferred release.",
    ),
    _mutant(
        name="pages-freed-before-drain",
        parts=replace(FIXED, decode_scheduler=PagesFreedEarly),
        killed_by="ordering",
        code="KV202",
        shows="Pages that a sender was asked to write are freed before it has drained; the slot waits.",
        matters="KV of an aborted request lands in the pages of a running one.",
        example="SGLang before 0.5.19 had no deferred release.",
    ),
    _mutant(
        name="rank-decides-alone",
        parts=replace(FIXED, group=DecidesAlone),
        code="KV601",
        shows="A rank commits a request because its own poll says Success.",
        matters="Queues of ranks differ from then on; the next reduction pairs one request's status with another.",
        example=f"{_E}: some ranks kept a request that others had taken.",
    ),
)
