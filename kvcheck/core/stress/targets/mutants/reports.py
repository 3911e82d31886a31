"""Mutants of reports, messages and progress, which move no wrong byte."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.request import StepReport
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.receiver import InboundRoom, Receiver
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class ReportKept(DecodeScheduler):
    def step(self) -> StepReport:
        report = super().step()
        self._report = report
        return report


class AbortUntold(DecodeScheduler):
    def abort(self, request_id: int) -> bool:
        return Scheduler.abort(self, request_id)


class StopLate(Receiver):
    def fail(self, receiving: InboundRoom, reason: str) -> None:
        writers, receiving.writers = receiving.writers, set()
        super().fail(receiving, reason)
        receiving.writers = writers


class WholeBatches(DecodeScheduler):
    def _admit(self) -> None:
        if not self._running:
            super()._admit()


class BatchWaits(DecodeScheduler):
    def _decode(self) -> bool:
        return not self._prefilling and super()._decode()


_mutant = partial(
    Mutant,
    bug="e",
    scenario="pd-transfer",
    shape="llama-3-tiny",
    killed_by="reports",
    code="KV605",
)
REPORTS: tuple[Mutant, ...] = (
    _mutant(
        name="report-not-renewed",
        bug="a",
        parts=replace(FIXED, decode_scheduler=ReportKept),
        scenario="retract-resume",
        shows="The report of a round repeats what the rounds before it reported.",
        matters="Whoever counts or answers by reports counts a request twice and answers it again after its end.",
        example="A list of outputs that is filled each step and cleared by a consumer that does not always run.",
    ),
    _mutant(
        name="abort-not-reported",
        parts=replace(FIXED, decode_scheduler=AbortUntold),
        shows="A request that is aborted leaves the queues of the decode end, and no report says so.",
        matters="Its router waits for an answer that never comes, and holds what it keeps for the request.",
        example="An abort that removes a request from the waiting queue and returns before the reply is made.",
    ),
    _mutant(
        name="stop-asked-late",
        parts=replace(FIXED, receiver=StopLate),
        killed_by="transfers",
        code="KV606",
        shows="The sender of a failed room is not asked to stop before the room's time is over once more.",
        matters="Pages and slots of each aborted request stay taken for as long as a room may take.",
        example="An abort that only marks the room, and leaves the rest to the thread that looks for timeouts.",
    ),
    _mutant(
        name="admits-whole-batches",
        parts=replace(FIXED, decode_scheduler=WholeBatches),
        killed_by="progress",
        code="KV607",
        shows="A decode end asks for prompts when its batch has ended, however much room there is before.",
        matters="Every request is right and late; nothing but the throughput shows it.",
        example="A condition of admission that counts running requests among those that are on their way.",
    ),
    _mutant(
        name="batch-waits-for-prompts",
        parts=replace(FIXED, decode_scheduler=BatchWaits),
        killed_by="progress",
        code="KV607",
        shows="Running requests are computed only in rounds in which no prompt is on its way.",
        matters="Each arriving prompt holds up all answers that are under way; none of them is wrong.",
        example="A loop that polls for transfers and goes on to the next round before it has run the batch.",
    ),
)
