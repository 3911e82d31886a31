"""Mutants that show only if a completion poll returns "no" or a message is late.

In the eager order every answer is "yes", and nothing is changed. The row has the number of "no" answers or late
messages, lost ones included, before the bug can show.

Invariants:
- A row's two parts have one fault each, and either alone does no harm within the bound of the row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.cache.hicache.movement import Movement
from kvcheck.core.cache.hicache.node import Transfer
from kvcheck.core.cache.hicache.storage_tier import StorageTier
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.transfer.messages import Abort, Message
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class LateBackupUnpinned(Movement):
    polls = 1
    _told: dict[int, int] | None = None
    """By number of the transfer, the polls that found it pending."""

    def poll(self) -> bool:
        is_some = super().poll()
        told = self._told = self._told or {}
        for transfer in self._oldest():
            told[transfer.number] = told.get(transfer.number, 0) + 1
            if told[transfer.number] == self.polls:
                super()._unpin(transfer)
        return is_some

    def _oldest(self) -> tuple[Transfer, ...]:
        return tuple(self.controller.backups[:1])

    def _unpin(self, transfer: Transfer) -> None:
        if (self._told or {}).get(transfer.number, 0) < self.polls:
            super()._unpin(transfer)


class TwiceLateBackupUnpinned(LateBackupUnpinned):
    polls = 2


class LateLoadUnpinned(LateBackupUnpinned):
    def _oldest(self) -> tuple[Transfer, ...]:
        return self.controller.loads[0] if self.controller.loads else ()


class AskedLoadRetired(TransferController):
    def finished_loads(self) -> int:
        done = super().finished_loads()
        for started in self.loads[done : done + 1]:
            assert started[0].producer is not None
            self.gate.retire(started[0].producer)
        return done


class LooksTwice(TransferController):
    def wait(self, transfer: Transfer) -> None:
        for signal in self._acknowledged_by(transfer):
            if not self._backend.query(signal):
                self._backend.query(signal)


class LatePutUnpinned(StorageTier):
    def poll(self) -> None:
        super().poll()
        for late in self._writes[:1]:
            self._tree.unlock_host(late.node)
            late.node = self._tree.root
            self._tree.lock_host(late.node)


class RetractAsks(DecodeScheduler):
    def _retract(self, active: RunningRequest) -> None:
        self._running.remove(active)
        active.offloaded = self.parts.offload.save(active.holding)
        self.parts.backend.query(active.offloaded.saved)
        self._pool.close(active.holding)
        active.rested_at = self._round + self.config.resume_delay
        self._retracted.append(active)
        self._report.retracted.append(active.request_id)


class FirstSavePinned(Offload):
    _noted: frozenset[int] = frozenset()

    def save(self, holding: Holding) -> OffloadedKV:
        value = super().save(holding)
        if holding.request in self._noted:
            kept = self._kept[value.number]
            for space, use in kept.uses:
                self.pool.allocators[space].drop(use)
            kept.uses.clear()
        self._noted |= {holding.request}
        return value


class DrainAskedOnce(Receiver):
    def is_drained(self, receiving: InboundRoom) -> bool:
        is_drained = super().is_drained(receiving)
        receiving.writers.clear()
        return is_drained


class AbortHeardLater(Sender):
    _heard: tuple[tuple[str, Abort], ...] = ()

    def poll(self) -> None:
        heard, self._heard = self._heard, ()
        for peer, message in heard:
            super()._take(peer, message)
        super().poll()

    def _take(self, peer: str, message: Message) -> None:
        if isinstance(message, Abort):
            self._heard += ((peer, message),)
        else:
            super()._take(peer, message)


_REUSED = "The copy carries another request's bytes into the cache, where every later hit reads them."
_TWO = "Two checks, of which one is enough"

_mutant = partial(
    Mutant,
    bug="b",
    scenario="hicache",
    shape="llama-3-micro",
    killed_by="lifetime",
    code="KV202",
    strategy="answers",
)
LATE: tuple[Mutant, ...] = (
    _mutant(
        name="late-backup-loses-pins",
        parts=replace(FIXED, movement=LateBackupUnpinned),
        within=1,
        shows="A poll that finds a backup unfinished gives its pins up, as if it had acknowledged it.",
        matters=_REUSED,
        example="A loop over the copies in flight that unlocks each node before it looks whether the copy is done.",
    ),
    _mutant(
        name="stuck-backup-loses-pins",
        parts=replace(FIXED, movement=TwiceLateBackupUnpinned),
        within=2,
        shows="A backup that two polls find unfinished counts as stuck, and its pins are given up.",
        matters=_REUSED,
        example="A watchdog for transfers that hang, which frees what they hold and does not end them.",
    ),
    _mutant(
        name="late-load-loses-pins",
        parts=replace(FIXED, movement=LateLoadUnpinned),
        within=1,
        shows="A poll that finds a load unfinished gives its pins up; if its request was aborted, nothing "
        "else holds them.",
        matters="The load writes into pages that belong to another request by then.",
        example="A loop over the copies in flight that unlocks each node before it looks whether the copy is done.",
    ),
    _mutant(
        name="asked-load-leaves-ring",
        parts=replace(FIXED, controller=AskedLoadRetired),
        within=1,
        shows="A load that was asked about gives its entry of the ring back, done or not, and readers do "
        "not wait for it.",
        matters="Attention works on what was in the page before: another request's prefix, in a few answers.",
        killed_by="ordering",
        code="KV201",
        example="An event that is reset by the call that asks for it.",
    ),
    _mutant(
        name="wait-looks-twice",
        parts=replace(FIXED, controller=LooksTwice),
        within=2,
        shows="A wait for a copy ends after two looks, and whoever waited goes on.",
        matters=_REUSED,
        example="A wait with a time limit whose result is not looked at.",
    ),
    _mutant(
        name="late-put-loses-pin",
        parts=replace(FIXED, storage=LatePutUnpinned),
        within=2,
        shows="A put into the store that is late loses the pin of its host pages.",
        matters="The store keeps another prefix's bytes under this prefix's key, for every engine that fetches them.",
        bug="d",
        example="A loop over the writes in flight that unlocks each node before it looks whether the write is done.",
    ),
    _mutant(
        name="retract-asks-for-save",
        parts=replace(FIXED, decode_scheduler=RetractAsks),
        within=2,
        shows="A retraction looks once whether its save is done, and frees the pages; then only their pins are left.",
        matters=f"{_TWO}: where the pins are still held too, the scheduler ends with an error, and all "
        "requests with it.",
        bug="a",
        scenario="retract-resume",
        killed_by="liveness",
        example="A wait that was made a look, so that retraction does not block the scheduler.",
    ),
    _mutant(
        name="later-save-without-pins",
        parts=replace(FIXED, decode_scheduler=RetractAsks, offload=FirstSavePinned),
        within=1,
        shows="The same, and a request that was retracted before has no pins any more.",
        matters=f"{_TWO}, and here both are gone: the pages are overwritten while they are saved.",
        bug="a",
        scenario="retract-resume",
        example="Pins that are noted by request, and not by save.",
    ),
    _mutant(
        name="drain-waits-one-round",
        parts=replace(FIXED, receiver=DrainAskedOnce, sender=AbortHeardLater),
        within=1,
        shows="A room that has not drained when it is asked about counts as drained the next time; the "
        "sender hears late.",
        matters="A late write lands in the pages of the next request. One round is enough as long as no "
        "message is late.",
        bug="e",
        scenario="pd-transfer",
        example="A release after a fixed time, chosen for a peer that has become slower since.",
    ),
)
