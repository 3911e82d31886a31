"""PairEngine: a prefill end and a decode end of several ranks each, joined in one process by the loopback wire.

Invariants:
- Each rank has its own pool, metadata, lanes and allocators, and counts as its own process: a wait of one rank is no
  wait of another.
- `standings` adds no wait: transfer progress is counted from completed chunks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from kvcheck.core.base.situations import SITUATIONS, Situation
from kvcheck.core.cache.scheduler.decode import ANOTHER_RANK, DecodeScheduler
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.process_group import RankGroup
from kvcheck.core.cache.scheduler.request import Request, StepReport
from kvcheck.core.cache.transfer.loopback_wire import LoopbackFabric
from kvcheck.core.cache.transfer.messages import Message
from kvcheck.core.stress.targets.observe import reported
from kvcheck.core.stress.targets.rank import (
    Rank,
    decision,
    decode_end,
    make_rank,
    pair_of,
    prefill_end,
    rank_counts,
    split_rows,
)
from kvcheck.core.stress.targets.target import Setup, SpaceCount, Standing, TargetParts
from kvcheck.core.stress.workload.events import Decided, Happened, LimitsNamed, MessageEmitted, Overdue, ProcessActs

PREFILL, DECODE = "prefill", "decode"
WAYS = ((PREFILL,), (DECODE,), (PREFILL, DECODE))
"""The ends that an abort goes to."""
ON_THE_WAY = ("asked for", "prefilling", "handing over", "sealing", "transferring")
"""States of requests with a requested prompt that has not arrived."""
TIME_LIMITS = ("nothing complete from", "not asked for and taken by", "stopped writing")
"""Parts of the reason of a room that timed out, at either end; the last if the message with the prefill end's reason
was lost."""


RankScheduler = PrefillScheduler | DecodeScheduler


class PairEngine:
    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        self._emit = setup.emit
        self._emit(LimitsNamed(TIME_LIMITS))
        self._backend = setup.backend
        self._pair = pair_of(setup)
        self._round = 0
        self._ahead = {PREFILL: 0, DECODE: 0}  # rounds by which the clock of an end runs ahead
        self._turn = 0
        self._preempted: set[int] = set()
        self._requests: dict[int, int] = {}  # by room
        self._over: dict[int, None] = {}  # requests that have failed and were not sent again
        self._group: RankGroup = parts.group()
        self._fabric = fabric = LoopbackFabric(
            paths=self._pair.paths,
            refuses=self._pair.refuses,
            vanishes=self._pair.vanishes,
            tamper=self._pair.tamper,
            copies=self._arrives,
        )
        self._prefill_ranks = [
            make_rank(parts, setup, "prefill", rank, backend=setup.backend, wire=fabric.end)
            for rank in range(self._pair.prefill_ranks)
        ]
        self._decode_ranks = [
            make_rank(parts, setup, "decode", rank, backend=setup.backend, wire=fabric.end)
            for rank in range(self._pair.decode_ranks)
        ]
        for rank in self._decode_ranks:
            split_rows(rank, self._pair.prefill_ranks)
        targets = [each.layout for each in self._decode_ranks]
        sources = [each.layout for each in self._prefill_ranks]
        self.prefill = [
            prefill_end(parts, setup, rank, targets, clock=lambda: self._clock(PREFILL)) for rank in self._prefill_ranks
        ]
        self.decode = [
            decode_end(parts, setup, rank, sources, clock=lambda: self._clock(DECODE)) for rank in self._decode_ranks
        ]
        self._emit(ProcessActs(""))
        self._backend.drain()

    @property
    def is_idle(self) -> bool:
        return all(each.is_idle for each in self._schedulers)

    def submit(self, request: Request) -> None:
        self._over.pop(request.request_id, None)
        self._requests[self._pair.room_of(request.request_id)] = request.request_id
        for prefill in self.prefill:
            prefill.submit(request)
        for decode in self.decode:
            decode.submit(request)

    def abort(self, request_id: int) -> bool:
        """End a request as a router would: even ids at both ends, odd ones at the decode end alone."""
        states = self._states()
        found = self._abort(request_id, (DECODE,) if request_id % 2 else (PREFILL,))
        if found:
            self._tell(request_id, "abort", states)
        return found

    def standings(self) -> tuple[Standing, ...]:
        """Ranks of an end decide alike, so one suffices for requests; room states differ by decode rank."""
        rooms = dict.fromkeys(pair for decode in self.decode for pair in decode.room_states().items())
        requests = [Standing("request", state, request) for request, state in self._states().items()]
        return (*requests, *(Standing("room", state, request) for request, state in rooms))

    def _states(self) -> dict[int, str]:
        """Work of the prefill end goes before a wait of the decode end."""
        prefill, decode = self.prefill[0].states(), self.decode[0].states()
        states: dict[int, str] = {}
        for request in dict.fromkeys((*decode, *prefill, *self._over)):
            here, there = decode.get(request), prefill.get(request)
            if here == "transferring":
                states[request] = self._sending_state(request, there)
            elif here is not None:
                states[request] = here
            elif request in self._over:
                states[request] = "ended" if there is None else "draining"
        return states

    def _sending_state(self, request: int, there: str | None) -> str:
        if there == "waiting":
            return "asked for"
        if there == "prefilling":
            return there
        under_way = partial(self._fabric.is_under_way, self._pair.room_of(request))
        return "handing over" if under_way("aux") else "sealing" if under_way("seal") else "transferring"

    def make_happen(self, happening: str, standing: Standing) -> bool:
        if not isinstance(standing.name, int):
            return False
        acts = {
            "abort": self._abort_somewhere,
            "preempt": self._preempt,
            "time out": self._time_out,
            "copy": self._copy,
        }
        self._turn += 1
        return happening in acts and acts[happening](standing.name)

    def _abort_somewhere(self, request_id: int) -> bool:
        return self._abort(request_id, WAYS[(self._turn + request_id) % len(WAYS)])

    def _abort(self, request_id: int, ends: Sequence[str]) -> bool:
        """End a request at these ends, and at the decode end if the prefill end has reported it already.

        A decode end that has not sent its Want has no peer to notify, so the prefill end is aborted as well.
        """
        is_asked = all(each.is_asked(request_id) for each in self.decode)
        found = False
        if PREFILL in ends or not is_asked:
            for rank, prefill in zip(self._prefill_ranks, self.prefill, strict=True):
                self._emit(ProcessActs(rank.name))
                found = prefill.abort(request_id) or found
        if DECODE in ends or not is_asked or not found:
            for rank, decode in zip(self._decode_ranks, self.decode, strict=True):
                self._emit(ProcessActs(rank.name))
                found = decode.abort(request_id) or found
        return found

    def _preempt(self, request_id: int) -> bool:
        done = []
        for rank, decode in zip(self._decode_ranks, self.decode, strict=True):
            self._emit(ProcessActs(rank.name))
            done.append(decode.preempt(request_id))
        if all(done):
            self._preempted.add(request_id)
        return all(done)

    def _time_out(self, request_id: int) -> bool:
        """Advance the clock of one end until all its ranks give the request up, and others that waited as long."""
        timed = [end for end in (PREFILL, DECODE) if self._deadlines(end, request_id)]
        if not timed:
            return False
        end = timed[self._turn % len(timed)]
        rounds = max(self._deadlines(end, request_id)) - self._clock(end)
        self._ahead[end] += rounds
        given_up = [
            each for each, state in self._states().items() if state in ON_THE_WAY and self._deadlines(end, each)
        ]
        self._emit(Overdue(end, rounds, tuple(given_up), TIME_LIMITS))
        return True

    def _copy(self, request_id: int) -> bool:
        self._emit(ProcessActs(""))
        return self._fabric.repeat(self._pair.room_of(request_id), turn=self._turn)

    def _arrives(self, sender: str, peer: str, message: Message) -> int:
        copies = self._pair.copies(sender, peer, message)
        self._emit(
            MessageEmitted(
                sender=sender,
                peer=peer,
                kind=type(message).__name__,
                request=self._requests[message.room],
                generation=message.generation,
                copies=copies,
            )
        )
        return copies

    def _clock(self, end: str) -> int:
        return self._round + self._ahead[end]

    def _deadlines(self, end: str, request_id: int) -> list[int]:
        ranks = self.prefill if end == PREFILL else self.decode
        return [at for at in (each.deadline(request_id) for each in ranks) if at is not None]

    def step(self) -> StepReport:
        self._round += 1
        states = self._states()
        before = self._step_end(PREFILL, self._prefill_ranks, self.prefill)
        report = self._step_end(DECODE, self._decode_ranks, self.decode)
        self._emit(ProcessActs(""))
        self._over |= dict.fromkeys(request for request, _ in report.failed)
        for request in report.retracted:
            if request not in self._preempted:
                self._tell(request, "retract", states)
            self._preempted.discard(request)
        # No rank computed anything in this round: time passes until the next one.
        if not (before.admitted or before.joined or report.admitted or report.joined or report.finished):
            self._backend.idle()
        return report

    def _tell(self, request: int, happening: str, states: Mapping[int, str]) -> None:
        situation = Situation("request", states.get(request, ""), happening)
        if situation.key in SITUATIONS:
            self._emit(Happened(situation.subject, situation.state, happening))

    def counts(self) -> tuple[SpaceCount, ...]:
        ranks = (*self._prefill_ranks, *self._decode_ranks)
        return tuple(row for rank in ranks for row in rank_counts(rank))

    def evictions(self) -> int:
        return 0

    def close(self) -> None:
        self._emit(ProcessActs(""))
        self._backend.drain()
        for rank in (*self._prefill_ranks, *self._decode_ranks):
            rank.padding.look()
        for scheduler in self._schedulers:
            scheduler.close()

    @property
    def _schedulers(self) -> tuple[RankScheduler, ...]:
        return (*self.prefill, *self.decode)

    def _step_end(self, end: str, ranks: Sequence[Rank], schedulers: Sequence[RankScheduler]) -> StepReport:
        known = []
        for rank, scheduler in zip(ranks, schedulers, strict=True):
            self._emit(ProcessActs(rank.name))
            known.append(scheduler.poll())
        reports = []
        for rank, scheduler, agreed in zip(ranks, schedulers, self._group.agree(known), strict=True):
            self._emit(ProcessActs(rank.name))
            reports.append(scheduler.settle(agreed))
        self._emit(Decided(end, tuple(decision(report) for report in reports)))
        reports[0].failed = _reasons(reports)
        self._emit(reported(end, reports[0]))
        return reports[0]


def _reasons(reports: Sequence[StepReport]) -> list[tuple[int, str]]:
    """Failed attempts, each with the reason of the rank that saw the failure.

    Two attempts of a request can fail in one round. Ranks that decided alike list failures in the same order.
    """
    first, *others = (report.failed for report in reports)
    rows = list(first)
    for failed in others:
        for at, (known, row) in enumerate(zip(rows, failed, strict=False)):
            if known == (row[0], ANOTHER_RANK):
                rows[at] = row
    return rows
