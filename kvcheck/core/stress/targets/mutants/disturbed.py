"""Mutants that show only if an abort, a retraction or a timeout meets a request in a certain state."""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.request import RunningRequest
from kvcheck.core.cache.transfer.receiver import SUCCESS, InboundRoom, Receiver
from kvcheck.core.cache.transfer.sender import OutboundRoom, Sender
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class ReusesOldCopy(DecodeScheduler):
    """A request retracted while its restore is kept gets its earlier copy back, and nothing is saved."""

    def _retract(self, active: RunningRequest) -> None:
        kept = next((each for each in self._restoring if each[1].request == active.request_id), None)
        super()._retract(active)
        if kept is not None and active.offloaded is not None:
            self._restoring.remove(kept)
            self.parts.offload.discard(active.offloaded)
            active.offloaded = kept[1]


class DropsRestoredTwice(DecodeScheduler):
    """An abort of a just resumed request discards its saved value; the next round does so again."""

    def _abort(self, active: RunningRequest) -> None:
        super()._abort(active)
        for _, offloaded in self._restoring:
            if offloaded.request == active.request_id:
                self.parts.offload.discard(offloaded)


class AbortKeepsSaved(DecodeScheduler):
    """An abort of a retracted request leaves its saved value allocated."""

    def _abort(self, active: RunningRequest) -> None:
        if active.offloaded is None:
            super()._abort(active)
        else:
            self._retracted.remove(active)


class ArrivedIsFreed(DecodeScheduler):
    """An aborted room that this rank has verified is freed without waiting for other ranks."""

    def _end(self, active: RunningRequest, reason: str) -> None:
        super()._end(active, reason)
        if active.room is not None and active.room.status == SUCCESS:
            self._draining.remove(active)
            active.room.writers.clear()
            self.receiver.forget(active.room)
            self._give_back(active)


class TimeOutDrains(Receiver):
    """A source that timed out counts as drained."""

    def fail(self, receiving: InboundRoom, reason: str) -> None:
        super().fail(receiving, reason)
        if self._clock() >= receiving.deadline - self._patience and "nothing complete" in reason:
            receiving.writers.clear()


class AbortFreesAtOnce(Sender):
    """Memory of an aborted prompt is freed at once, with writes of its row or seal in progress."""

    def state(self, room: int) -> int:
        sending = self._rooms[room]
        if sending.slot is not None and sending.reason.startswith("aborted"):
            sending.flushed.clear()
            sending.reads.clear()
        return super().state(room)


class GivesUpAtOnce(Sender):
    """Memory of a prompt that was not taken in time is freed at once."""

    def _give_up(self, sending: OutboundRoom) -> None:
        super()._give_up(sending)
        if sending.reason:
            sending.flushed.clear()
            sending.reads.clear()


_CLOCK = "SGLang's decode queue polls rooms and gives up those whose waiting time is over"

DISTURBED: tuple[Mutant, ...] = (
    Mutant(
        name="retract-reuses-old-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=ReusesOldCopy),
        scenario="retract-resume",
        shape="llama-3-tiny",
        killed_by="contract",
        code="KV301",
        shows="A request that is retracted right after its resume gets its earlier copy back instead of a new one.",
        matters="The tokens that it decoded in between have no KV; it goes on with a shorter past than its output.",
        example="A copy on the host is kept for the next retraction, as hosts have room and copies take time.",
    ),
    Mutant(
        name="abort-drops-restored-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=DropsRestoredTwice),
        scenario="retract-resume",
        shape="llama-3-tiny",
        killed_by="liveness",
        code="KV402",
        shows="An abort gives back the saved copy of a request that was just resumed. The next round does so again.",
        matters="Host memory is freed twice, and the second time it may be another request's.",
        example="Two queues name one request, and an abort walks both.",
    ),
    Mutant(
        name="abort-keeps-saved-copy",
        bug="a",
        parts=replace(FIXED, decode_scheduler=AbortKeepsSaved),
        scenario="retract-resume",
        shape="llama-3-tiny",
        killed_by="accounting",
        code="KV401",
        shows="An abort of a retracted request forgets what was saved of it on the host.",
        matters="Each user who leaves while the server is short of memory costs pinned host memory for ever.",
        example="SGLang's abort removes a request from the queue of retracted ones; its kv_cache_cpu is a field of it.",
    ),
    Mutant(
        name="arrived-room-freed-alone",
        bug="e",
        parts=replace(FIXED, decode_scheduler=ArrivedIsFreed),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="liveness",
        code="KV301",
        shows="A decode rank that has verified a room gives it back on an abort, while other ranks still drain theirs.",
        matters="Queues of ranks differ from then on; the next reduction pairs one request's status with another.",
        example="Each rank polls its own transfer; an abort finds it in different queues of different ranks.",
    ),
    Mutant(
        name="timeout-counts-as-drain",
        bug="e",
        parts=replace(FIXED, receiver=TimeOutDrains),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="ordering",
        code="KV202",
        shows="A source that was too late counts as one that writes nothing any more.",
        matters="A machine that was only slow writes into pages that belong to another request by then.",
        example=f"{_CLOCK}; the pages are freed with the room.",
    ),
    Mutant(
        name="abort-frees-what-is-sent",
        bug="e",
        parts=replace(FIXED, sender=AbortFreesAtOnce),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="ordering",
        code="KV202",
        shows="Pages and slot of a prompt are freed when it is aborted, while its row or seal is under way.",
        matters="The next prompt's bytes are sent in its place.",
        example="An abort on the prefill server frees the request as if it had never been handed to the engine.",
    ),
    Mutant(
        name="give-up-frees-what-is-sent",
        bug="e",
        parts=replace(FIXED, sender=GivesUpAtOnce),
        scenario="pd-transfer",
        shape="qwen3-next-tiny",
        killed_by="ordering",
        code="KV202",
        shows="Pages and slot of a prompt that nobody took in time are freed while they are still being sent.",
        matters="The next prompt's bytes are sent in its place.",
        example=f"{_CLOCK}, on either server.",
    ),
)
