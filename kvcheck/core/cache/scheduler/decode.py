"""DecodeScheduler: a scheduler whose prompts are computed elsewhere and arrive over a wire.

Invariants:
- Joint decisions of ranks (admission, failure, release) follow from `settle`'s agreed values.
- Pages and slot of a failed request stay allocated until no source can write them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcheck.core.cache.scheduler.parts import SchedulerDeps, take_slot_and_row
from kvcheck.core.cache.scheduler.request import RunningRequest, SchedulerConfig, StepReport
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.cache.transfer.receiver import FAILED, SUCCESS, TRANSFERRING, InboundRoom, Receiver

ANOTHER_RANK = "another rank failed"
"""Reason at a rank that has not failed itself."""

ABORTED = "aborted by the decode end"

JUST_JOINED = 2
"""Outputs after one decode step: the first token came with the prompt."""


# waiting -> pages and slot allocated, Want sent -> transferring -> SUCCESS on every rank -> ready -> running ...
#                                                       |-> FAILED on any rank -> drained on every rank -> freed
class DecodeScheduler(Scheduler):
    def __init__(
        self,
        parts: SchedulerDeps,
        config: SchedulerConfig,
        *,
        metadata: MetadataBuffers,
        receiver: Receiver,
        room_of: Callable[[int], int],
    ) -> None:
        super().__init__(parts, config)
        self.receiver = receiver
        self._metadata = metadata
        self._room_of = room_of
        self._statuses: dict[int, int] = {}
        self._draining: list[RunningRequest] = []
        self._failed: list[tuple[int, str]] = []

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._draining or self._failed)

    def abort(self, request_id: int) -> bool:
        found = super().abort(request_id)
        if found:
            self._failed.append((request_id, ABORTED))
        return found

    def is_asked(self, request_id: int) -> bool:
        """True once the Want was sent, or if the request is not here."""
        return all(each.request_id != request_id for each in self._waiting)

    def states(self) -> dict[int, str]:
        """Scheduler.states with "joined" and "draining". A request that was sent again is waiting while its earlier
        attempt drains."""
        states = super().states()
        joined = {each.request_id for each in self._running if len(each.output) <= JUST_JOINED}
        states |= {request: "joined" for request, state in states.items() if state == "running" and request in joined}
        return {each.request_id: "draining" for each in self._draining} | states

    def room_states(self) -> dict[int, str]:
        states = {each.request_id: self._room_state(_room(each)) for each in self._prefilling}
        return {request: state for request, state in states.items() if state is not None}

    def deadline(self, request_id: int) -> int | None:
        """Deadline of the request, or of its next drain request; None if no time runs for it."""
        coming = [_room(each) for each in self._prefilling if each.request_id == request_id]
        draining = [_room(each) for each in self._draining if each.request_id == request_id]
        timed = [
            *(each for each in coming if each.status == TRANSFERRING),
            *(each for each in draining if each.writers),
        ]
        return timed[0].deadline if timed else None

    def _room_state(self, room: InboundRoom) -> str | None:
        if room.status == SUCCESS:
            return "arrived"
        return "partly reported" if 0 < len(room.waits) < len(self.receiver.sources) else None

    def poll(self) -> list[int]:
        """Receive, and return this rank's values for `RankGroup.agree`: statuses of the transferring requests, then
        whether the failed ones are drained."""
        self.receiver.poll()
        statuses = [_room(active).status for active in self._prefilling]
        return statuses + [int(self.receiver.is_drained(_room(each))) for each in self._draining]

    def settle(self, agreed: Sequence[int]) -> StepReport:
        count = len(self._prefilling)
        self._statuses = {active.request_id: status for active, status in zip(self._prefilling, agreed, strict=False)}
        drained = [each for each, is_it in zip(self._draining, agreed[count:], strict=True) if is_it]
        self.receiver.forget(*(_room(active) for active in drained))
        for active in drained:
            self._give_back(active)
        self._draining = [each for each in self._draining if each not in drained]
        report = self.step()
        report.failed += self._failed
        self._failed = []
        return report

    def close(self) -> None:
        self.receiver.free()
        super().close()
        self._metadata.free()

    def _arrived(self) -> list[RunningRequest]:
        """Requests that every rank has verified. End those that failed on any rank."""
        arrived = []
        for active in list(self._prefilling):
            status = self._statuses.get(active.request_id, TRANSFERRING)
            if status == SUCCESS:
                self._take(active)
                arrived.append(active)
            elif status == FAILED:
                self._failed.append((active.request_id, _room(active).reason or ANOTHER_RANK))
                self._end(active, ANOTHER_RANK)
        return arrived

    def _take(self, active: RunningRequest) -> None:
        self._prefilling.remove(active)
        active.metadata = self.receiver.take(_room(active))
        self._pool.commit(active.holding, active.prompt_length)
        active.output.append(int(active.metadata.field("output_ids")[0]))

    def _end(self, active: RunningRequest, reason: str) -> None:
        self._prefilling.remove(active)
        self.receiver.fail(_room(active), reason)
        self._draining.append(active)

    def _give_back(self, active: RunningRequest) -> None:
        """Free the pages of a drained request. (mutant: pages-freed-before-drain)"""
        self._pool.close(active.holding)

    def _prefilling_state(self, active: RunningRequest) -> str:
        return "transferring"

    def _abort(self, active: RunningRequest) -> None:
        if active in self._prefilling:
            self._end(active, ABORTED)
        else:
            super()._abort(active)

    def _admit(self) -> None:
        while self._waiting and not self._resume_is_due():
            request = self._waiting[0]
            room, prompt = self._room_of(request.request_id), len(request.prompt)
            if len(self._prefilling) >= self.config.max_prefilling or self.receiver.is_open(room):
                break
            taken = take_slot_and_row(self._metadata, self._pool, request.request_id, tokens=prompt + 1, query=prompt)
            if taken is None:
                break
            slot, holding = taken
            active = RunningRequest(request=request, holding=holding, lease=None)
            active.room = self.receiver.expect(room, holding, prompt, slot, attempt=request.attempt)
            self._waiting.popleft()
            self._prefilling.append(active)
            self._report.admitted.append(request.request_id)

    def _prefill(self) -> bool:
        return False

    @property
    def _will_free(self) -> bool:
        return super()._will_free or bool(self._draining)

    def _wait_for_something(self) -> None:
        """Messages are polled for, never waited for."""
        if not (self._prefilling or self._draining):
            super()._wait_for_something()


def _room(active: RunningRequest) -> InboundRoom:
    assert active.room is not None, "every request of a decode rank has one"
    return active.room
