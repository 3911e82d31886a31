"""DecodeScheduler: a scheduler whose prompts are computed elsewhere and arrive over a wire.

    waiting -> pages and slot taken, asked for -> transferring -> SUCCESS on every rank -> ready -> running ...
                                                        |-> FAILED on any rank -> drained on every rank -> given back

Invariants:
- What ranks decide together (who is in, who failed, what is given back) follows from `settle`'s values, which all ranks
  agreed on, never from this rank's own. (mutant: rank-decides-alone)
- Pages and slot of a request that failed stay taken until no source can write them any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcheck.core.cache.scheduler.handover import HandOver
from kvcheck.core.cache.scheduler.parts import SchedulerDeps, take_slot_and_row
from kvcheck.core.cache.scheduler.request import RunningRequest, SchedulerConfig, StepReport
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.receiver import FAILED, SUCCESS, TRANSFERRING, InboundRoom, Receiver

ANOTHER_RANK = "another rank failed"
"""The reason of a rank that knows of a failure by agreement alone."""

ABORTED = "aborted by the decode end"


class Arrivals(HandOver):
    """Requests whose prompts are on their way, and those that failed and are not drained yet."""

    receiver: Receiver

    def __init__(self, parts: SchedulerDeps) -> None:
        super().__init__(parts)
        self.failed: list[tuple[int, str]] = []
        self.statuses: dict[int, int] = {}
        self._draining: list[RunningRequest] = []

    def values(self) -> list[int]:
        """What this rank knows, request by request: statuses, then whether memory is drained."""
        statuses = [_room(active).status for active in self.actives]
        return statuses + [int(self.receiver.is_drained(_room(each))) for each in self._draining]

    def settle(self, agreed: Sequence[int]) -> None:
        """What all ranks know of the same requests."""
        count = len(self.actives)
        self.statuses = {active.request: status for active, status in zip(self.actives, agreed, strict=False)}
        drained = [each for each, is_it in zip(self._draining, agreed[count:], strict=True) if is_it]
        self.receiver.forget(*(_room(active) for active in drained))
        for active in drained:
            self._give_back(active)
        self._draining = [each for each in self._draining if each not in drained]

    def advance(self) -> list[RunningRequest]:
        """Requests that every rank has verified; those that failed somewhere are ended here too."""
        arrived = []
        for active in list(self.actives):
            status = self.statuses.get(active.request, TRANSFERRING)
            if status == SUCCESS:
                self._take_row(active)
                self.actives.remove(active)
                arrived.append(active)
            elif status == FAILED:
                self._end(active, ANOTHER_RANK)
        return arrived

    def wait(self) -> bool:
        """Messages are polled for, never waited for."""
        return bool(self.actives or self._draining)

    def abort(self, active: RunningRequest) -> None:
        """End a request on this rank; its memory stays until it is drained."""
        self.actives.remove(active)
        self.receiver.fail(_room(active), ABORTED)
        self._draining.append(active)

    @property
    def is_draining(self) -> bool:
        """Memory of failed requests is not given back yet."""
        return bool(self._draining)

    @property
    def is_holding(self) -> bool:
        """Also what is being drained comes back."""
        return bool(self.actives) or self.is_draining

    def _end(self, active: RunningRequest, reason: str) -> None:
        room = _room(active)
        self.failed.append((active.request, room.reason or reason))
        self.actives.remove(active)
        self.receiver.fail(room, reason)
        self._draining.append(active)

    def _give_back(self, active: RunningRequest) -> None:
        """Nobody writes the failed request's pages any more. (mutant: pages-freed-before-drain)"""
        self._parts.pool.close(active.holding)

    def _take_row(self, active: RunningRequest) -> None:
        row = active.metadata = self.receiver.take(_room(active))
        self._parts.pool.commit(active.holding, active.prompt_length)
        active.output.append(int(row.field("output_ids")[0]))


def _room(active: RunningRequest) -> InboundRoom:
    """The room in which a request's prompt arrives."""
    assert active.room is not None, "every request of a decode rank has one"
    return active.room


class DecodeScheduler(Scheduler):
    """One decode rank."""

    _handing_over: Arrivals

    def __init__(
        self,
        parts: SchedulerDeps,
        config: SchedulerConfig,
        *,
        receiver: Receiver,
        room_of: Callable[[int], int],
        arrivals: type[Arrivals] = Arrivals,
    ) -> None:
        super().__init__(parts, config, hand_over=arrivals)
        self.may_ask = True
        """Whether every rank of this end has somebody to ask; set between rounds, from what all ranks agreed on."""
        self.receiver = receiver
        self._handing_over.receiver = receiver
        self._room_of = room_of

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do, and nothing to be drained."""
        return super().is_idle and not self._handing_over.is_draining

    def abort(self, request: int) -> bool:
        """End a request wherever it is; it is reported as failed, as every request is that does not finish."""
        found = super().abort(request)
        if found:
            self._handing_over.failed.append((request, ABORTED))
        return found

    def is_asked(self, request: int) -> bool:
        """The request's prompt has been asked for, or it is not here at all."""
        return all(each.request != request for each in self._waiting)

    def poll(self) -> list[int]:
        """Take what arrived; what this rank knows, to be reduced over the ranks by the least value."""
        self.receiver.poll()
        return self._handing_over.values()

    def settle(self, agreed: Sequence[int]) -> StepReport:
        """One scheduling round, with what all ranks agreed on."""
        self._handing_over.settle(agreed)
        report = self.step()
        report.failed += self._handing_over.failed
        self._handing_over.failed = []
        return report

    def close(self) -> None:
        """Give everything back."""
        self.receiver.free()
        super().close()

    def _abort(self, active: RunningRequest) -> None:
        if active in self._handing_over.actives:
            self._handing_over.abort(active)
        else:
            super()._abort(active)

    def _admit(self) -> None:
        while self._waiting and self.may_ask and not self._resume_is_due():
            generation = self._waiting[0]
            room, prompt = self._room_of(generation.request), len(generation.prompt)
            if len(self._handing_over.actives) >= self.config.max_prefilling or self.receiver.is_open(room):
                break
            taken = take_slot_and_row(
                self.parts.decode_metadata, self._pool, generation.request, tokens=prompt + 1, query=prompt
            )
            if taken is None:
                break
            slot, holding = taken
            active = RunningRequest(generation=generation, holding=holding, lease=None)
            active.room = self.receiver.expect(room, holding, prompt, slot, attempt=generation.attempt)
            self._waiting.popleft()
            self._handing_over.begin(active)
            self._report.admitted.append(generation.request)
