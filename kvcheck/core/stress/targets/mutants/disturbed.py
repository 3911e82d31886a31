"""Mutants that show only if an abort, a retraction or a timeout meets a request in a certain state."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.transfer.receiver import SUCCESS, InboundRoom, Receiver
from kvcheck.core.cache.transfer.sender import OutboundRoom, Sender
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class ReusesOldCopy(DecodeScheduler):
    def _retract(self, active: RunningRequest) -> None:
        kept = next((each for each in self._restoring if each[1].request == active.request_id), None)
        super()._retract(active)
        if kept is not None and active.offloaded is not None:
            self._restoring.remove(kept)
            self.parts.offload.discard(active.offloaded)
            active.offloaded = kept[1]


class DropsRestoredTwice(DecodeScheduler):
    def _abort(self, active: RunningRequest) -> None:
        super()._abort(active)
        for _, offloaded in self._restoring:
            if offloaded.request == active.request_id:
                self.parts.offload.discard(offloaded)


class AbortKeepsSaved(DecodeScheduler):
    def _abort(self, active: RunningRequest) -> None:
        if active.offloaded is None:
            super()._abort(active)
        else:
            self._retracted.remove(active)


class ArrivedIsFreed(DecodeScheduler):
    def _end(self, active: RunningRequest, reason: str) -> None:
        super()._end(active, reason)
        if active.room is not None and active.room.status == SUCCESS:
            self._draining.remove(active)
            active.room.writers.clear()
            self.receiver.forget(active.room)
            self._give_back(active)


class TimeOutDrains(Receiver):
    def fail(self, receiving: InboundRoom, reason: str) -> None:
        super().fail(receiving, reason)
        if self._clock() >= receiving.deadline - self._patience and "nothing complete" in reason:
            receiving.writers.clear()


class AbortFreesAtOnce(Sender):
    def state(self, room: int) -> int:
        sending = self._rooms[room]
        if sending.slot is not None and sending.reason.startswith("aborted"):
            sending.flushed.clear()
            sending.reads.clear()
        return super().state(room)


class GivesUpAtOnce(Sender):
    def _give_up(self, sending: OutboundRoom) -> None:
        super()._give_up(sending)
        if sending.reason:
            sending.flushed.clear()
            sending.reads.clear()


_CLOCK = "SGLang's decode queue polls rooms and gives up those whose waiting time is over"

_mutant = partial(
    Mutant,
    bug="e",
    scenario="pd-transfer",
    shape="llama-3-tiny",
    killed_by="ordering",
    code="KV202",
)
DISTURBED: tuple[Mutant, ...] = (
    _mutant(
        name="retract-reuses-old-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=ReusesOldCopy),
        scenario="retract-resume",
        killed_by="contract",
        code="KV301",
        shows="A request that is retracted right after its resume gets its earlier copy back instead of a new one.",
        matters="The tokens that it decoded in between have no KV; it goes on with a shorter past than its output.",
        example="A copy on the host is kept for the next retraction, as hosts have room and copies take time.",
    ),
    _mutant(
        name="abort-drops-restored-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=DropsRestoredTwice),
        scenario="retract-resume",
        killed_by="liveness",
        code="KV402",
        shows="An abort gives back the saved copy of a request that was just resumed. The next round does so again.",
        matters="Host memory is freed twice, and the second time it may be another request's.",
        example="Two queues name one request, and an abort walks both.",
    ),
    _mutant(
        name="abort-keeps-saved-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=AbortKeepsSaved),
        scenario="retract-resume",
        killed_by="accounting",
        code="KV401",
        shows="An abort of a retracted request forgets what was saved of it on the host.",
        matters="Each user who leaves while the server is short of memory costs pinned host memory for ever.",
        example="SGLang's abort removes a request from the queue of retracted ones; its kv_cache_cpu is a field of it.",
    ),
    _mutant(
        name="arrived-room-freed-alone",
        parts=replace(FIXED, decode_scheduler=ArrivedIsFreed),
        killed_by="liveness",
        code="KV301",
        shows="A decode rank that has verified a room gives it back on an abort, while other ranks still drain theirs.",
        matters="Queues of ranks differ from then on; the next reduction pairs one request's status with another.",
        example="Each rank polls its own transfer; an abort finds it in different queues of different ranks.",
    ),
    _mutant(
        name="timeout-counts-as-drain",
        parts=replace(FIXED, receiver=TimeOutDrains),
        shows="A source that was too late counts as one that writes nothing any more.",
        matters="A machine that was only slow writes into pages that belong to another request by then.",
        example=f"{_CLOCK}; the pages are freed with the room.",
    ),
    _mutant(
        name="abort-frees-what-is-sent",
        parts=replace(FIXED, sender=AbortFreesAtOnce),
        shows="Pages and slot of a prompt are freed when it is aborted, while its row or seal is under way.",
        matters="The next prompt's bytes are sent in its place.",
        example="An abort on the prefill server frees the request as if it had never been handed to the engine.",
    ),
    _mutant(
        name="give-up-frees-what-is-sent",
        parts=replace(FIXED, sender=GivesUpAtOnce),
        shape="qwen3-next-tiny",
        shows="Pages and slot of a prompt that nobody took in time are freed while they are still being sent.",
        matters="The next prompt's bytes are sent in its place.",
        example=f"{_CLOCK}, on either server.",
    ),
)
