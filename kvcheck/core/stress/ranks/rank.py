"""RankRun: one rank of a pair in a process of its own, from its memory to its summary.

Invariants:
- The ranks of an end agree on every round, so their rounds stay in step. Patience is counted in seconds.
- An idle rank answers its peers until all ranks are done.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable
from dataclasses import replace

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.base.record import to_plain
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.process_group import GroupLost, ProcessRanks, RankGroup
from kvcheck.core.cache.scheduler.request import StepReport
from kvcheck.core.cache.transfer.layout import EndLayout, layout_from_json
from kvcheck.core.cache.transfer.sockets.link import Link, Listener, connect
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.evidence import EvidenceCount
from kvcheck.core.stress.history import History
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.plan_scenario import variant_of
from kvcheck.core.stress.ranks.child import Inbox
from kvcheck.core.stress.ranks.quarantine import Quarantine
from kvcheck.core.stress.ranks.spec import RankSpec, RankSummary, pair_scenario, rank_backend, ways_of, work_of
from kvcheck.core.stress.ranks.stalls import Stalls
from kvcheck.core.stress.ranks.stressed_wire import StressedWire
from kvcheck.core.stress.scenarios.pd_transfer import Aborts, Faults, prefill_sizes, room_of
from kvcheck.core.stress.scenarios.serving import HURRY, Feed, make_setup
from kvcheck.core.stress.targets.rank import decision, decode_end, make_rank, prefill_end, rank_counts
from kvcheck.core.stress.targets.target import PairSetup, TargetParts
from kvcheck.core.stress.workload.events import (
    Aborted,
    Closed,
    Counted,
    Expected,
    Faulted,
    ProcessActs,
    Resumed,
    Retracted,
    Returned,
    Verified,
)

QUIET_S, QUIETEST_S = 0.0005, 0.008
"""The pause after a round without events, and after SETTLED_S of such rounds. A held room lasts seconds, in which polls
of its ranks would use all cores."""
SETTLED_S = 0.5
"""Longer than any write. Until then a rank polls often, to see bytes that land after their status."""
JUDGES = ("content", "aliasing", "contract", "accounting", "protocol")
"""Oracles that need no more than one rank's history."""

PREFILL_STAGES = ("admitted", "late")
"""Stages at which a request is still the prefill end's to abort."""

Say = Callable[[str, dict[str, object]], None]


class RankRun:
    def __init__(self, spec: RankSpec, wire: type[ProcessWire], say: Say, inbox: Inbox, *, parts: TargetParts) -> None:
        self._spec = spec
        self._inbox = inbox
        self._parts = parts
        self._say = say
        self._history = History()
        self._oracles = [ORACLES.load(name)() for name in JUDGES]
        self._quarantine = Quarantine(spec.name)
        self._count = EvidenceCount()
        self._history.listen(self._count.handlers())
        self._history.listen(self._quarantine.handlers())
        self._sealed_bytes: dict[str, int] = {}
        self._history.listen(((Faulted, self._tell_fault), (Verified, self._count_sealed)))
        for oracle in self._oracles:
            self._history.listen(oracle.handlers())
        plan = parse_line(spec.line)
        shape, load = work_of(plan)
        for job in load.jobs:
            self._history.emit(Expected(job.request, ()))
        self._backend = rank_backend(plan, spec.end)
        scenario = pair_scenario(plan)
        variant = scenario.table.variant(variant_of(plan))
        paths, sends_rows = ways_of(scenario, variant, takes_paths=wire.takes_paths)
        setup = make_setup(shape, load, self._backend, self._history.emit, share_prefixes=False)
        self._setup = replace(
            setup,
            pair=PairSetup(
                prefill_ranks=spec.prefill,
                decode_ranks=spec.decode,
                prefill_sizes=prefill_sizes(setup.sizes, load.jobs, shape),
                paths=paths,
                room_of=room_of,
                patience=spec.patience_s,
                aux_over_messages=sends_rows,
            ),
        )
        self._feed = Feed(load.jobs, hurry=HURRY)
        faults = Faults(load.jobs, shape, self._history.emit, variant)
        self._aborts = Aborts(variant["abort stage"], faults)
        self._stalls = Stalls(
            load.jobs, shape, faults, self._history.emit, variant.number, aux=not sends_rows, paths=paths
        )
        self.rank = make_rank(
            parts,
            self._setup,
            spec.end,
            spec.rank,
            backend=self._backend,
            wire=lambda own: StressedWire(wire(own), faults, self._stalls, self._quarantine),
        )
        assert isinstance(self.rank.wire, StressedWire)
        self.wire = self.rank.wire.inner
        self.wire.network = spec.network
        self.wire.paths, self.wire.late_s = paths, self._stalls.late_s
        self._fenced: set[str] = set()
        self._group: RankGroup | None = None
        self._scheduler: PrefillScheduler | DecodeScheduler | None = None
        self._open: list[int] = []
        self._alone = ""
        self._decisions = 0
        self._started = time.monotonic()

    # The peers

    def meet(self) -> None:
        links = self._links({"name": self.rank.name, "layout": to_plain(self.rank.layout)})
        peers = [_layout(link) for link in links]
        if self._spec.end == "prefill":
            self._scheduler = prefill_end(self._parts, self._setup, self.rank, peers, clock=self._seconds)
        else:
            self._scheduler = decode_end(self._parts, self._setup, self.rank, peers, clock=self._seconds)
        self._setup.emit(ProcessActs(self.rank.name))
        self.wire.start(links, lease_s=self._spec.lease_s)
        ranks = self._spec.prefill if self._spec.end == "prefill" else self._spec.decode
        # Another rank may first wait for a peer that reads nothing, and then for a room that is late.
        timeout_s = self._spec.patience_s + 2 * self._spec.lease_s
        spec = self._spec
        self._group = ProcessRanks(spec.meeting, spec.rank, ranks, timeout_s=timeout_s)
        self._say("ready", {})

    def _links(self, hello: dict[str, object]) -> list[Link]:
        if self._spec.end == "prefill":
            found = self._inbox.addresses.get()
            return [connect(found[name], self._spec.key, hello) for name in self._spec.peers]
        with contextlib.closing(Listener()) as listener:
            self._say("listening", {"address": listener.address})
            return listener.accept(self._spec.key, hello, set(self._spec.peers))

    def _seconds(self) -> int:
        return int(time.monotonic() - self._started)

    # The rounds

    def run_rounds(self) -> None:
        assert self._scheduler is not None
        eventful_s = time.monotonic()
        while self._is_serving():
            for request in self._feed.due(is_idle=self._scheduler.is_idle):
                self._scheduler.submit(request)
                self._open.append(request.request_id)
            report = self._scheduler.settle(self._agree(self._scheduler.poll()))
            self._tell(report)
            for request_id in self._aborts(report):
                self._abort(request_id)
            self._end_what_is_lost()
            if any((report.admitted, report.joined, report.finished, report.failed, report.resumed)):
                eventful_s = time.monotonic()
            else:
                time.sleep(QUIETEST_S if time.monotonic() - eventful_s > SETTLED_S else QUIET_S)
        self._say("stalled", {"requests": sorted(self._stalls.told)})
        self._say("idle", {})

    def _is_serving(self) -> bool:
        assert self._scheduler is not None
        return self._feed.is_open or not self._scheduler.is_idle

    def _agree(self, known: list[int]) -> list[int]:
        assert self._group is not None
        try:
            return self._group.agree([known])[0]
        except GroupLost as error:
            self._alone = f"another {self._spec.end} rank is gone"
            self._say("lost", {"what": f"{self._alone}: {error}"})
            self._group = RankGroup()
            return known

    def _tell(self, report: StepReport) -> None:
        if any(decided := decision(report)):
            self._decisions = zlib.crc32(repr(decided).encode(), self._decisions)
        for request_id in report.retracted:
            self._history.emit(Retracted(request_id))
        for request_id in report.resumed:
            self._history.emit(Resumed(request_id))
        for request_id, tokens in report.finished:
            self._end(request_id)
            self._say("finished", {"request": request_id, "tokens": list(tokens)})
        for request_id, reason in report.failed:
            self._fail(request_id, reason)

    def _tell_fault(self, event: Faulted) -> None:
        self._say("faulted", {"request": event.request, "why": event.why, "names": list(event.names)})

    def _count_sealed(self, event: Verified) -> None:
        if event.buffer == "sealed":
            request_id = str(event.request)
            self._sealed_bytes[request_id] = self._sealed_bytes.get(request_id, 0) + event.words * 8

    def _abort(self, request_id: int) -> None:
        """Every rank of an end sees the same reports, and so aborts the same requests in the same round."""
        assert self._scheduler is not None
        if self._scheduler.states().get(request_id) == "draining":
            return
        is_for_prefill = request_id % 2 == 0 and self._aborts.stage in PREFILL_STAGES
        if is_for_prefill == (self._spec.end == "prefill") and self._scheduler.abort(request_id):
            self._history.emit(Aborted(request_id))
            self._say("aborted", {"request": request_id})
            if self._spec.end == "decode":
                self._end(request_id)

    def _end(self, request_id: int) -> None:
        if request_id in self._open:
            self._open.remove(request_id)

    def _fail(self, request_id: int, reason: str) -> None:
        if request_id in self._open:
            self._open.remove(request_id)
            self._say("failed", {"request": request_id, "reason": reason})

    def _end_what_is_lost(self) -> None:
        gone = self.wire.gone()
        for peer in sorted(set(gone) - self._fenced):
            self._fenced.add(peer)
            self._say("fenced", {"peer": peer})
        if isinstance(self._scheduler, DecodeScheduler):
            for peer in gone:
                self._scheduler.receiver.fence(peer)
        why = self._alone or (f"{', '.join(gone)} is gone" if gone and self._spec.end == "prefill" else "")
        for request_id in list(self._open) if why else ():
            assert self._scheduler is not None
            if self._scheduler.abort(request_id):
                self._fail(request_id, why)

    # The end

    def answer_until_over(self) -> None:
        assert self._scheduler is not None
        while not self._inbox.is_over:
            self._scheduler.poll()
            time.sleep(QUIET_S * 4)

    def close(self) -> None:
        assert self._scheduler is not None
        counts = rank_counts(self.rank)
        for count in counts:
            self._history.emit(Counted(count.space, count.free, count.cached, count.total))
        self.rank.padding.look()
        self._scheduler.close()
        returned = rank_counts(self.rank)
        for count in returned:
            self._history.emit(Returned(count.space, count.free, count.total))
        self._history.emit(Closed(tuple(sorted(self._backend.allocated().items()))))
        for oracle in self._oracles:
            oracle.finish()
        summary = RankSummary(
            counts={each.space: (each.free, each.total) for each in counts},
            returned={each.space: (each.free, each.total) for each in returned},
            decisions=self._decisions,
            sealed=self._sealed_bytes,
            quarantined=self._quarantine.judged,
            findings=(
                *(finding for oracle in self._oracles for finding in oracle.findings),
                *self._quarantine.findings,
            ),
            evidence=self._count.total(events=self._history.count, evictions=0, orderings=0),
        )
        self._say("closed", {"summary": to_plain(summary)})


def _layout(link: Link) -> EndLayout:
    """The peer's layout. Raises LayoutMismatch, also for the layout of another rank."""
    layout = layout_from_json(link.hello.get("layout"))
    if layout.name != link.peer:
        raise LayoutMismatch(f"{link.peer} brings the layout of {layout.name}; expected its own")
    return layout
