"""What a pair says of its requests and rooms, and what can be made to happen to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from kvcheck.core.cache.backend.backend import Backend, Completed, Submitted
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.events import Event
from kvcheck.core.stress.history import History
from kvcheck.core.stress.scenarios.pd_transfer import PATIENCE, prefill_sizes, room_of
from kvcheck.core.stress.scenarios.retract_resume import RetractResume
from kvcheck.core.stress.scenarios.serving import make_setup, request_of
from kvcheck.core.stress.strategies import Recorder, make_strategy
from kvcheck.core.stress.targets.pair import PairEngine
from kvcheck.core.stress.targets.target import FIXED, PairSetup, Standing
from kvcheck.core.stress.workload.events import Overdue, ProcessActs
from kvcheck.core.stress.workload.shapes import shape

SHAPE = shape("llama-3-tiny")
REQUESTS = 5
ROUNDS = 3000


class Pair:
    """A small pair and what it told. order: a strategy, or "eager"."""

    def __init__(
        self,
        order: str = "eager",
        *,
        schedule: int = 1,
        ranks: tuple[int, int] = (1, 1),
        paths: Mapping[str, str] | None = None,
    ) -> None:
        self.history = History(keep=True)
        self.finished: set[int] = set()
        self.failed: dict[int, str] = {}
        self.landing: dict[int, tuple[str, int]] = {}  # operations that have not run: (name, request)
        self.history.listen(((Submitted, self._submitted), (Completed, self._completed)))
        load = RetractResume().load(SHAPE, seed=3, requests=REQUESTS, trace=None, variant=0)
        backend = self._backend(order, schedule)
        setup = make_setup(SHAPE, load, backend, self.history.emit, share_prefixes=False)
        pair = PairSetup(
            prefill_ranks=ranks[0],
            decode_ranks=ranks[1],
            prefill_sizes=prefill_sizes(setup.sizes, load.jobs, SHAPE),
            paths=paths or {},
            room_of=room_of,
            patience=PATIENCE,
        )
        self.engine = PairEngine(FIXED, replace(setup, pair=pair))
        self.requests = {job.request: request_of(job) for job in load.jobs}
        for request in self.requests.values():
            self.engine.submit(request)

    def _backend(self, order: str, schedule: int) -> Backend:
        observer = self.history.emit
        if order == "eager":
            return EagerBackend(observer)
        strategy = make_strategy(order, seed=1, schedule=schedule, choices=None)
        return SimulatedBackend(Recorder(strategy), observer)

    def _submitted(self, event: Submitted) -> None:
        if event.name.startswith("wire.") and event.request is not None:
            self.landing[event.ordinal] = (event.name, event.request)

    def _completed(self, event: Completed) -> None:
        self.landing.pop(event.ordinal, None)

    def rounds(self) -> Iterator[tuple[Standing, ...]]:
        """The standings before each round, until nothing is left to do."""
        for _ in range(ROUNDS):
            if self.engine.is_idle:
                return
            yield self.engine.standings()
            report = self.engine.step()
            self.finished |= {request for request, _ in report.finished}
            self.failed |= dict(report.failed)
        raise AssertionError(f"{ROUNDS} rounds were not enough")

    def run(self) -> None:
        """Go on to the end. Then every request has ended, and everything is free."""
        for _ in self.rounds():
            pass
        assert self.finished | self.failed.keys() == self.requests.keys()
        assert all(each.free == each.total and not each.cached for each in self.engine.counts())
        self.engine.close()

    def events(self, kind: type[Event]) -> list[Event]:
        """Events of a kind."""
        return [each for each in self.history.events if isinstance(each, kind)]

    def reach(self, state: str, *, subject: str = "request") -> Standing | None:
        """Go on to the first round before which some subject is in a state. None if that never comes."""
        found = (
            each for standings in self.rounds() for each in standings if (each.subject, each.state) == (subject, state)
        )
        return next(found, None)


def pair_in(state: str, *, subject: str = "request") -> tuple[Pair, Standing]:
    """A pair that has come so far that some subject is in a state, in the first order in which that comes."""
    for schedule in range(10):
        for order in ("lazy", "random"):
            pair = Pair(order, schedule=schedule, ranks=((4, 2), (2, 1), (2, 4))[schedule % 3])
            if state in ("restoring", "retracted"):
                running = pair.reach("running")
                assert running is not None and pair.engine.make_happen("preempt", running)
            if (standing := pair.reach(state, subject=subject)) is not None:
                return pair, standing
    raise AssertionError(f"no {subject} was {state}")


@pytest.mark.schedules
@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
def test_where_a_request_stands_is_what_its_operations_say(order: str) -> None:
    pair, seen = Pair(order, ranks=(4, 2)), set[tuple[str, str]]()
    for standings in pair.rounds():
        seen |= {(each.subject, each.state) for each in standings}
        requests = {each.name: each.state for each in standings if each.subject == "request"}
        assert len(requests) == sum(each.subject == "request" for each in standings), "one state each"
        for name, state in requests.items():
            legs = {leg.partition(".")[2] for leg, request in pair.landing.values() if request == name}
            assert (state == "handing over") == ("aux" in legs), (name, state, legs)
            assert (state == "sealing") == ("seal" in legs and "aux" not in legs), (name, state, legs)
            if state in ("ready", "joined", "running"):
                assert not legs
    assert {("request", state) for state in ("waiting", "asked for", "joined", "running")} <= seen


@pytest.mark.schedules
@pytest.mark.parametrize("state", ["partly reported", "arrived"])
def test_of_several_ranks_one_may_know_more_than_the_others(state: str) -> None:
    pair, standing = pair_in(state, subject="room")
    assert {("request", "joined", standing.name), ("request", "running", standing.name)}.isdisjoint(
        (each.subject, each.state, each.name) for each in pair.engine.standings()
    )
    assert pair.engine.make_happen("abort", standing)
    pair.run()
    assert pair.failed.keys() == {standing.name}


ON_THE_WAY = ("asked for", "prefilling", "handing over", "sealing", "transferring")
STATES = (*ON_THE_WAY, "waiting", "joined", "running", "restoring", "retracted")


@pytest.mark.schedules
@pytest.mark.parametrize("state", STATES)
def test_an_abort_at_either_end_or_both_ends_the_request_alone(state: str) -> None:
    pair, standing = pair_in(state)
    for _ in range(STATES.index(state) % 3):  # each try is a turn, and the ends take turns
        assert not pair.engine.make_happen("nothing that it knows", standing)
    assert pair.engine.make_happen("abort", standing)
    pair.run()
    assert isinstance(standing.name, int)
    assert re.fullmatch(r"aborted by the (prefill|decode) end", pair.failed.pop(standing.name))
    assert not pair.failed


@pytest.mark.schedules
def test_a_request_that_is_resumed_can_be_retracted_at_once() -> None:
    pair, standing = pair_in("restoring")
    for _ in range(3):
        assert pair.engine.make_happen("preempt", standing)
        again = pair.reach("restoring")
        assert again is not None
        standing = again
    pair.run()
    assert not pair.failed


@pytest.mark.schedules
@pytest.mark.parametrize("end", ["prefill", "decode"])
@pytest.mark.parametrize("state", ON_THE_WAY)
def test_a_clock_that_runs_ahead_ends_rooms_with_their_reason(state: str, end: str) -> None:
    pair, standing = pair_in(state)
    if end == "prefill":  # the ends take turns
        assert not pair.engine.make_happen("nothing that it knows", standing)
    assert pair.engine.make_happen("time out", standing)
    (event,) = pair.events(Overdue)
    assert isinstance(event, Overdue) and standing.name in event.requests
    assert event.end == end or state == "asked for"
    pair.run()
    assert pair.failed.keys() <= set(event.requests)
    for reason in pair.failed.values():
        assert any(name in reason for name in event.names), reason


@pytest.mark.schedules
def test_nothing_happens_where_it_cannot() -> None:
    pair, running = pair_in("running")
    before = len(pair.history.events)
    assert not pair.engine.make_happen("time out", running)
    assert not pair.engine.make_happen("preempt", Standing("request", "waiting", 999))
    assert not pair.engine.make_happen("abort", Standing("request", "waiting", 999))
    assert not pair.engine.make_happen("copy", Standing("request", "waiting", 999))
    assert not pair.engine.make_happen("evict", running)
    assert not pair.engine.make_happen("preempt", Standing("prefix", "on the device", "a text"))
    assert [each for each in pair.history.events[before:] if not isinstance(each, ProcessActs)] == []
