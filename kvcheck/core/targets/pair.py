"""PairEngine: a prefill end and a decode end of several ranks each, joined in one process by the loopback wire.

Invariants:
- Each rank has its own pool, metadata, lanes and allocators, and counts as its own process: a wait of one rank is no
  wait of another.
- Ranks of one end share agreed values and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcheck.core.cache.scheduler.agreement import RankGroup
from kvcheck.core.cache.scheduler.decode import ANOTHER_RANK
from kvcheck.core.cache.scheduler.request import Request, StepReport
from kvcheck.core.cache.transfer.loopback_wire import LoopbackFabric
from kvcheck.core.targets.parts import TargetParts
from kvcheck.core.targets.rank import (
    Rank,
    decision,
    decode_end,
    make_rank,
    pair_of,
    prefill_end,
    rank_counts,
    split_rows,
)
from kvcheck.core.targets.target import Setup, SpaceCount, Standing
from kvcheck.core.workload.events import Decided, ProcessActs


class RankScheduler(Protocol):
    """A rank of either end."""

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do."""

    def poll(self) -> list[int]:
        """What this rank knows, as numbers to agree on."""

    def settle(self, agreed: Sequence[int]) -> StepReport:
        """One round, with what all ranks agreed on."""

    def close(self) -> None:
        """Give everything back."""


class PairEngine:
    """The Engine over both ends. Requests finish on the decode end."""

    def __init__(self, parts: TargetParts, setup: Setup) -> None:
        self._emit = setup.emit
        self._backend = setup.backend
        self._pair = pair_of(setup)
        self._round = 0
        self._group: RankGroup = parts.group()
        fabric = LoopbackFabric(
            paths=self._pair.paths,
            refuses=self._pair.refuses,
            vanishes=self._pair.vanishes,
            tamper=self._pair.tamper,
            copies=self._pair.copies,
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
            prefill_end(parts, setup, rank, targets, clock=lambda: self._round) for rank in self._prefill_ranks
        ]
        self.decode = [
            decode_end(parts, setup, rank, sources, clock=lambda: self._round) for rank in self._decode_ranks
        ]
        self._emit(ProcessActs(""))
        self._backend.drain()

    @property
    def is_idle(self) -> bool:
        """Nothing is left to do on any rank."""
        return all(each.is_idle for each in self._schedulers)

    def submit(self, request: Request) -> None:
        """Queue a request at both ends."""
        for prefill in self.prefill:
            prefill.submit(request)
        for decode in self.decode:
            decode.submit(request)

    def abort(self, request_id: int) -> bool:
        """End a request where its user's router can: even ones at both ends, odd ones at the decode end alone.

        A decode end that has not sent its Want yet has no peer to tell, so then the prefill end is told as well.
        """
        is_asked = all(each.is_asked(request_id) for each in self.decode)
        found = False
        if request_id % 2 == 0 or not is_asked:
            for rank, prefill in zip(self._prefill_ranks, self.prefill, strict=True):
                self._emit(ProcessActs(rank.name))
                found = prefill.abort(request_id) or found
        if request_id % 2 or not is_asked or not found:
            for rank, decode in zip(self._decode_ranks, self.decode, strict=True):
                self._emit(ProcessActs(rank.name))
                found = decode.abort(request_id) or found
        return found

    def standings(self) -> tuple[Standing, ...]:
        """Requests, by their state at the end that works on them. Ranks of an end decide alike, so one tells all."""
        prefill, decode = self.prefill[0].states(), self.decode[0].states()
        states: dict[int, str] = {}
        for request in dict.fromkeys((*decode, *prefill)):
            here, there = decode.get(request), prefill.get(request)
            if here in ("waiting", "transferring") and there in ("prefilling", "handing over"):
                states[request] = there
            elif here is not None or there == "draining":
                states[request] = here or "draining"
        return tuple(Standing("request", state, request) for request, state in states.items())

    def make_happen(self, happening: str, standing: Standing) -> bool:
        """See Engine. What this engine cannot do is False."""
        if standing.subject != "request" or not isinstance(standing.name, int):
            return False
        acts = {"abort": self.abort, "preempt": self._preempt}
        return happening in acts and acts[happening](standing.name)

    def _preempt(self, request_id: int) -> bool:
        done = []
        for rank, decode in zip(self._decode_ranks, self.decode, strict=True):
            self._emit(ProcessActs(rank.name))
            done.append(decode.preempt(request_id))
        return all(done)

    def step(self) -> StepReport:
        """One round of every rank, prefill first."""
        self._round += 1
        before = self._step_end("prefill", self._prefill_ranks, self.prefill)
        report = self._step_end("decode", self._decode_ranks, self.decode)
        self._emit(ProcessActs(""))
        # No rank computed anything in this round: time passes until the next one.
        if not (before.admitted or before.joined or report.admitted or report.joined or report.finished):
            self._backend.idle()
        return report

    def counts(self) -> tuple[SpaceCount, ...]:
        """Accounting of every rank."""
        ranks = (*self._prefill_ranks, *self._decode_ranks)
        return tuple(row for rank in ranks for row in rank_counts(rank))

    def evictions(self) -> int:
        """Always 0: a pair caches no prefix."""
        return 0

    def close(self) -> None:
        """Check the padding, then free everything."""
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
        return reports[0]


def _reasons(reports: Sequence[StepReport]) -> list[tuple[int, str]]:
    """Failed requests, each with the reason of the rank that saw the failure; others only know that some rank did."""
    reasons = dict(reports[0].failed)
    for request, reason in (each for report in reports for each in report.failed):
        if reasons.get(request) == ANOTHER_RANK:
            reasons[request] = reason
    return list(reasons.items())
