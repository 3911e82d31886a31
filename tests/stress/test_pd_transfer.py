"""Prefill and decode ends as a whole: every family and rank pair, what arrives counted apart, faults, variations."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
from rigs.settings import with_settings

from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Signal, Submitted
from kvcheck.core.cache.events import RoomChanged
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.messages import Drained, Message, Want
from kvcheck.core.cache.transfer.receiver import SUCCESS, Receiver
from kvcheck.core.cache.transfer.sender import Sender
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress import runner as engine_module
from kvcheck.core.stress.history import History
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.pd_transfer import FAULT_KINDS
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.target import FIXED, TargetParts
from kvcheck.core.stress.workload.events import (
    Aborted,
    Closed,
    Counted,
    Failed,
    Faulted,
    Finished,
    Overdue,
    Retried,
    Returned,
)
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

SCENARIO_NAMES = ("pd-transfer", "nvlink-aux")
RANK_PAIRS = ((2, 2), (2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (1, 4), (4, 4))
"""Ranks of both ends."""
REQUESTS = 6


class Bench:
    """Runs plans against one target and keeps the events of the last one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: BuiltinTarget | None = None) -> None:
        self.engine = ScheduleRunner(target or BuiltinTarget())
        self.history = History()
        monkeypatch.setattr(engine_module, "History", self._keeping)

    def _keeping(self) -> History:
        self.history = History(keep=True)
        return self.history

    def run(self, name: str, scenario: str = "pd-transfer", **values: Any) -> Outcome:
        """One schedule, which has to be green."""
        plan = Plan(scenario=scenario, shape=name, seed=5, **({"requests": REQUESTS} | values))
        outcome = self.engine.run(plan)
        assert [(found.code, found.oracle, found.message) for found in outcome.findings] == [], plan.line()
        assert outcome.verdict is Verdict.PASS and not outcome.broken_oracles
        return outcome

    def events(self, *kinds: type) -> list[Any]:
        return [event for event in self.history.events if isinstance(event, kinds)]

    def prompts(self, plan: Plan) -> dict[int, int]:
        load, _ = self.engine.workloads.of(plan)
        return {job.request: job.prompt_tokens for job in load.jobs}


def words_of(model: ModelShape, tokens: int, ranks: int) -> int:
    """Words that one decode rank of `ranks` has to see for a prompt, its metadata row included."""
    pages = -(-tokens // model.page_size)
    rows = pages * model.page_size
    heads = max(1, model.num_kv_heads // ranks)
    per_row = heads * (model.head_dim + model.head_dim) * model.kv_dtype.itemsize
    if model.scale_block:
        per_row += heads * (model.head_dim + model.head_dim) // model.scale_block * 4
    if model.latent_dim:
        per_row = model.latent_row_bytes or model.latent_dim * 2
    size = len(model.full_layers) * rows * per_row
    size += len(model.full_layers) * pages * (8448 if model.index_head_dim else 0)
    seen = pages - max(0, tokens + 1 - model.window) // model.page_size
    size += len(model.window_layers) * seen * model.page_size * per_row
    states = max(1, model.ssm_heads // ranks) if model.ssm_heads else 0
    conv = model.conv_dim // model.ssm_heads * (model.conv_kernel - 1) * 2 if states else 0
    size += len(model.state_layers) * states * (conv + model.ssm_key_dim * model.ssm_value_dim * 4)
    return (size + 1600) // 8


def check_ends(bench: Bench) -> Counter[str]:
    """Everything is free, and every request came to the end that it has to come to; how many of each."""
    for count in bench.events(Counted):
        assert count.free == count.total and count.cached == 0, count
    spaces = {each.space for each in bench.events(Counted)}
    assert {"prefill-0:full", "decode-0:full", "prefill-0:metadata-prefill", "decode-0:metadata-decode"} <= spaces
    assert all(each.free == each.total for each in bench.events(Returned))
    assert [each.held for each in bench.events(Closed)] == [()]
    finished = {each.request for each in bench.events(Finished)}
    failures = [(each.request, each.reason) for each in bench.events(Failed)]
    failed = dict(reversed(failures))  # why each failed first
    overdue = {request: each.names for each in bench.events(Overdue) for request in each.requests}
    aborted = {each.request for each in bench.events(Aborted)}
    retried = [each.request for each in bench.events(Retried)]
    ends: Counter[str] = Counter(finished=len(finished), aborted=len(aborted), retried=len(retried))
    assert set(retried) <= failed.keys() and len(set(retried)) == len(retried)
    assert finished & failed.keys() <= set(retried), "nothing but what was sent again does both"
    times = Counter(request for request, _ in failures)
    for request in set(retried) - finished:
        assert times[request] == 2 and request in aborted | overdue.keys(), (
            "what is sent again finishes, or is disturbed"
        )
    for fault in bench.events(Faulted):
        reason = failed[fault.request]
        assert fault.request in retried or fault.request not in finished
        if any(name in reason for name in overdue.get(fault.request, ())):
            ends["overdue"] += 1
            continue
        if "refused" in fault.why:
            ends["refused"] += 1
            assert re.search(r"the engine refused to write (kv|state|seal) for room \d+", reason)
            continue
        if kind := next((each for each in ("never landed", "was lost") if each in fault.why), ""):
            ends[kind] += 1
            assert re.search(r"nothing complete from prefill-\d.* in 200 rounds", reason)
            continue
        found = re.search(
            r"source has (\d+) pages from logical page (\d+), target has (\d+) pages from logical page (\d+)", reason
        )
        assert found is not None, reason
        source, first, target, start = map(int, found.groups())
        ends["longer" if start + target > first + source else "shorter"] += 1
        assert abs(start + target - first - source) == 1
        assert f"has the length {target}, " in fault.why
    return ends


@pytest.mark.schedules
@pytest.mark.parametrize(("name", "scenario"), [*zip(TINY_SHAPES, cycle(SCENARIO_NAMES), strict=False)])
def test_the_fixed_build_is_green_and_every_byte_that_has_to_arrive_is_verified(
    name: str, scenario: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(monkeypatch)
    at = 3 * (list(TINY_SHAPES).index(name) + SCENARIO_NAMES.index(scenario))
    for number, strategy in enumerate(("eager", "lazy", "random")):
        if number == at % 3:
            continue  # two of the three
        sources, targets = RANK_PAIRS[(at + number) % len(RANK_PAIRS)]
        cell = Plan(scenario=scenario, shape=name, seed=5)
        schedule = with_settings(cell, f"rank layout:{sources}x{targets}", is_calm=True).schedule
        requests = 2 if shape(name).index_head_dim else REQUESTS  # index pages are large
        outcome = bench.run(name, scenario, strategy=strategy, schedule=schedule, requests=requests)
        prompts = bench.prompts(outcome.plan)
        arrived = [event for event in bench.events(RoomChanged) if event.new == SUCCESS]
        lanes = {event.lane for event in bench.events(Submitted) if event.name.startswith("wire.seal")}
        assert {int(lane.split(">")[1].split(":")[0].split("-")[1]) for lane in lanes} == set(range(targets))
        assert {int(lane.split(">")[0].split("-")[1]) for lane in lanes} <= set(range(sources))
        words = sum(words_of(shape(name), prompts[event.request], targets) for event in arrived)
        assert outcome.evidence.words_verified["sealed"] == words > 0
        assert outcome.evidence.transfers == len(arrived) > 0
        assert outcome.judged["protocol"] > len(arrived)
        assert check_ends(bench)["finished"] > 0


@pytest.mark.schedules
def test_faults_aborts_and_all_ways_of_the_row_end_as_they_must(monkeypatch: pytest.MonkeyPatch) -> None:
    name, bench, ends, ways = "gpt-oss-tiny", Bench(monkeypatch), Counter[str](), Counter[str]()
    for scenario in SCENARIO_NAMES:
        ways_of = SCENARIOS.load(scenario)().metadata_paths
        for at, kind in enumerate(FAULT_KINDS):
            wanted = (f"fault kind:{kind}", f"metadata path:{ways_of[at % len(ways_of)]}", "retry delay:at once")
            plan = with_settings(Plan(scenario=scenario, shape=name, seed=5), *wanted, is_calm=True)
            strategy = "lazy" if at % 2 else "eager"
            bench.run(name, scenario, strategy=strategy, schedule=plan.schedule, requests=10)
            ends += (ended := check_ends(bench))
            names = Counter(event.name for event in bench.events(Submitted))
            has_rows, has_messages = names["wire.aux"] > 0, names["wire.message.auxdata"] > 0
            assert has_rows != has_messages, "a run has one way for its rows"
            row = "message" if has_messages else "row not acknowledged" if names["wire.aux.sent"] else "row"
            ways[f"{scenario}, {row}"] += 1
            is_early = names["wire.kv.sent"] > 0
            assert ended["never landed"] or is_early == (scenario == "nvlink-aux"), "reported when queued, there only"
    kinds = {"refused", "shorter", "longer", "never landed", "was lost"}
    assert ends.keys() - {"overdue"} == {"finished", "aborted", "retried"} | kinds
    assert min(ends.values()) > 0
    assert set(ways) == {
        *("pd-transfer, row", "pd-transfer, message"),
        *("nvlink-aux, row", "nvlink-aux, row not acknowledged", "nvlink-aux, message"),
    }


# Legal variations

TAKEN: Counter[str] = Counter()
"""How often each variation took place."""


class OtherWire:
    """A wire that does a little more than the one it wraps."""

    def __init__(self, wire: Any) -> None:
        self._wire = wire

    def __getattr__(self, name: str) -> Any:
        return getattr(self._wire, name)


class SaysTwice(OtherWire):
    """Every message is sent twice."""

    def send(self, peer: str, message: Message, *, after: Sequence[Signal] = ()) -> None:
        TAKEN["twice"] += 1
        self._wire.send(peer, message, after=after)
        self._wire.send(peer, message, after=after)


class Late(OtherWire):
    """Messages, and what comes behind them, are heard some polls later; the end of a drain long after it."""

    def __init__(self, wire: Any) -> None:
        super().__init__(wire)
        self._held: deque[tuple[int, tuple[str, Message]]] = deque()
        self._now = 0

    def receive(self) -> list[tuple[str, Message]]:
        self._now += 1
        for sender, message in self._wire.receive():
            TAKEN["late"] += 1
            self._held.append((self._now + (15 if isinstance(message, Drained) else 3), (sender, message)))
        heard = []
        while self._held and self._held[0][0] <= self._now:
            heard.append(self._held.popleft()[1])
        return heard


def over(wire: type[OtherWire]) -> TargetParts:
    """The fixed parts, with both ends over another wire."""

    class OtherSender(Sender):
        def __init__(self, pool: Any, metadata: Any, inner: Any, *values: Any, **named: Any) -> None:
            super().__init__(pool, metadata, wire(inner), *values, **named)  # type: ignore[arg-type]

    class OtherReceiver(Receiver):
        def __init__(self, pool: Any, metadata: Any, inner: Any, *values: Any, **named: Any) -> None:
            super().__init__(pool, metadata, wire(inner), *values, **named)  # type: ignore[arg-type]

    return replace(FIXED, sender=OtherSender, receiver=OtherReceiver)


VARIATIONS: dict[str, Callable[[], BuiltinTarget]] = {
    "every message comes twice": lambda: BuiltinTarget(over(SaysTwice)),
    "messages come later": lambda: BuiltinTarget(over(Late)),
}


@pytest.mark.schedules
@pytest.mark.parametrize("name", VARIATIONS)
def test_a_legal_variation_gives_no_finding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [("llama-3-tiny", "short lists, refusals", True), ("llama-3-tiny", "losses", False)]
    cases.append(("gpt-oss-tiny", "losses", True))
    for at, (model, kind, is_calm) in enumerate(cases):
        bench = Bench(monkeypatch, VARIATIONS[name]())
        cell = Plan(scenario=SCENARIO_NAMES[at % 2], shape=model, seed=5)
        plan = with_settings(cell, f"fault kind:{kind}", is_calm=is_calm)
        TAKEN.clear()
        outcome = bench.run(model, plan.scenario, strategy="random", schedule=plan.schedule)
        assert outcome.evidence.transfers and sum(TAKEN.values()) > 0
        assert not is_calm or check_ends(bench)["finished"]


class Deaf(OtherWire):
    """Not legal: what one decode rank asks for first is never heard, however often it is said."""

    def receive(self) -> list[tuple[str, Message]]:
        return [each for each in self._wire.receive() if not isinstance(each[1], Want) or each[1].request != 3]


@pytest.mark.schedules
def test_the_same_harness_finds_a_wire_that_loses_messages() -> None:
    plan = Plan(scenario="pd-transfer", shape="llama-3-tiny", seed=5, requests=3, strategy="eager")
    outcome = ScheduleRunner(BuiltinTarget(over(Deaf))).run(with_settings(plan, is_calm=True))
    assert ("KV604", 3) in {(found.code, found.request) for found in outcome.findings}
