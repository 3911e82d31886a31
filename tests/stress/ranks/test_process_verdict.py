"""The verdict on the ranks' reports, and a stressed wire that holds a leg: on literal values, without processes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from kvcheck.core.base.errors import TransferError
from kvcheck.core.base.record import Evidence
from kvcheck.core.cache.backend.region_backend import RegionBackend
from kvcheck.core.cache.backend.scoped import ScopedBackend
from kvcheck.core.cache.transfer.messages import Abort, Drained, Message, Status
from kvcheck.core.cache.transfer.sockets.wire import SocketWire
from kvcheck.core.cache.transfer.wire import LEGS, Ticket
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.history import History
from kvcheck.core.stress.ranks.quarantine import Quarantine
from kvcheck.core.stress.ranks.spec import RankSummary, work_of
from kvcheck.core.stress.ranks.stalls import HELD_S, Stalls
from kvcheck.core.stress.ranks.stressed_wire import StressedWire
from kvcheck.core.stress.ranks.supervisor import RankReport
from kvcheck.core.stress.ranks.verdict import judge
from kvcheck.core.stress.scenarios.pd_transfer import Faults, PDTransfer
from kvcheck.core.stress.workload.events import Faulted
from kvcheck.core.stress.workload.handover import bytes_for

PLAN = Plan(scenario="pd-transfer", shape="llama-3-tiny", transport="tcp", ranks="1x2", seed=5, requests=4)
SHAPE, LOAD = work_of(PLAN)
TOKENS = {job.request: (job.request,) for job in LOAD.jobs}
FAULT = Faulted(3, "a write of its kv was refused", ("refused", "kv"))
WHY = "the engine refused to write kv"


def reports(**changes: Callable[[RankReport], object]) -> dict[str, RankReport]:
    """Four requests on a prefill and two decode ranks: 1 and 2 are served, 3 is refused, 4 is aborted."""
    made = {}
    for name in ("prefill-0", "decode-0", "decode-1"):
        sealed = {str(job.request): bytes_for(SHAPE, job.prompt_tokens, 2) for job in LOAD.jobs if job.request < 3}
        made[name] = RankReport(
            name=name,
            summary=RankSummary(
                counts={"full": (8, 8)},
                returned={"full": (8, 8)},
                decisions=1,
                sealed={} if name == "prefill-0" else sealed,
                quarantined=1,
                findings=(),
                evidence=Evidence(retractions=2),
            ),
        )
        if name != "prefill-0":
            made[name].finished = {request: TOKENS[request] for request in (1, 2)}
            made[name].failed = {3: WHY}
            made[name].aborted = {4}
    made["prefill-0"].failed = {3: WHY, 4: "aborted"}
    made["prefill-0"].faulted = {3: FAULT}
    for name, change in changes.items():
        change(made[name.replace("_", "-")])
    return made


def test_what_was_done_to_requests_is_no_finding_and_is_counted_once() -> None:
    judged = judge(reports(), SHAPE, LOAD, TOKENS)
    assert judged.findings == () and judged.verified == judged.expected > 0
    assert (judged.evidence.aborts, judged.evidence.retractions, judged.evidence.requests) == (1, 2, 4)


def both(change: Callable[[RankReport], object]) -> dict[str, Callable[[RankReport], object]]:
    """The same lie on both decode ranks, so that they agree."""
    return {"decode_0": change, "decode_1": change}


EVERYWHERE = ("prefill_0", "decode_0", "decode_1")
LIES: dict[str, tuple[str, dict[str, Callable[[RankReport], object]]]] = {
    "failed for nothing": ("KV604", both(lambda each: (each.finished.pop(2), each.failed.update({2: "x"})))),
    "failed for nothing at the prefill end": ("KV604", {"prefill_0": lambda each: each.failed.update({1: "x"})}),
    "its reason hides the fault": ("KV603", dict.fromkeys(EVERYWHERE, lambda each: each.failed.update({3: "oops"}))),
    "finished in spite of the fault": (
        "KV203",
        both(lambda each: (each.failed.pop(3), each.finished.update({3: TOKENS[3]}))),
    ),
    "finished after the abort": ("KV602", both(lambda each: each.finished.update({4: TOKENS[4]}))),
    "one rank did not abort": (
        "KV601",
        {"decode_1": lambda each: (each.aborted.clear(), each.failed.update({4: "aborted"}))},
    ),
    "forgotten": ("KV901", both(lambda each: each.aborted.clear())),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_seen(lie: str) -> None:
    code, changes = LIES[lie]
    found = judge(reports(**changes), SHAPE, LOAD, TOKENS).findings
    assert code in {each.code for each in found}, found


def test_an_abort_that_one_rank_heard_of_behind_the_failure_is_no_disagreement() -> None:
    """A rank whose engine died has failed request 4 already when its abort comes; the other rank aborts it."""
    two = reports()
    two["prefill-1"] = replace(two["prefill-0"], name="prefill-1", aborted={4}, failed={3: WHY, 4: "another rank"})
    assert judge(two, SHAPE, LOAD, TOKENS).findings == ()
    two["prefill-1"].failed = {3: WHY}
    (found,) = judge(two, SHAPE, LOAD, TOKENS).findings
    assert found.code == "KV601" and "2 and 1 failed, 0 and 1 were aborted" in found.message


def test_trouble_excuses_failures_and_nothing_else() -> None:
    _, failed = LIES["failed for nothing"]
    assert judge(reports(**failed), SHAPE, LOAD, TOKENS, troubled=("prefill-0",)).findings == ()
    code, finished = LIES["finished in spite of the fault"]
    found = judge(reports(**finished), SHAPE, LOAD, TOKENS, troubled=("prefill-0",)).findings
    assert code in {each.code for each in found}


# A leg that is held


def stressed(*, held: float | None) -> tuple[StressedWire, list[object], SocketWire]:
    """A wire on which request 2 waits so long with its kv, and what goes through it."""
    inner = SocketWire(ScopedBackend(RegionBackend(), "prefill-0"))
    through: list[object] = []

    def write(peer: str, leg: str, writes: object, *, ticket: Ticket, after: object) -> object:
        through.append((leg, ticket.request))
        return inner.backend.signal()

    def send(peer: str, message: Message, *, after: object = ()) -> None:
        through.append((type(message).__name__, message.room))

    inner.write, inner.send = write, send  # type: ignore[method-assign,assignment]

    class Holds(Stalls):
        def held_s(self, leg: str, ticket: Ticket) -> float | None:
            return held if (leg, ticket.request) == ("kv", 2) else None

    faults = Faults(LOAD.jobs, SHAPE, History().emit, PDTransfer().table.variant(4))
    stalls = Holds(LOAD.jobs, SHAPE, faults, History().emit, 0, aux=True, paths={})
    return StressedWire(inner, faults, stalls, Quarantine("prefill-0")), through, inner


def legs(wire: StressedWire, request: int) -> None:
    """A room's whole way, of a room with its request's number."""
    for leg in ("kv", "aux", "seal"):
        wire.write("decode-0", leg, (), ticket=Ticket(request, 1, request), after=())
    wire.send("decode-0", Status(room=request, generation=1, is_ok=True))


WAY = ("kv", "aux", "seal")


def test_a_held_leg_holds_its_own_room_alone_and_keeps_the_order() -> None:
    wire, through, _ = stressed(held=0.0)
    legs(wire, 2)
    legs(wire, 1)
    assert through == [*((leg, 1) for leg in WAY), ("Status", 1)]
    assert wire.receive() == []
    assert through[4:] == [*((leg, 2) for leg in WAY), ("Status", 2)]


@pytest.mark.parametrize(
    ("end", "is_over"),
    [
        (Drained(room=2, generation=1), True),
        (Status(room=2, generation=1, is_ok=False, reason="x"), True),
        (Drained(room=2, generation=0), False),
    ],
)
def test_what_is_held_is_never_written_once_the_room_is_over(end: Message, is_over: bool) -> None:
    wire, through, _ = stressed(held=0.0)
    legs(wire, 2)
    wire.send("decode-0", end)
    assert wire.receive() == [] and (through == [(type(end).__name__, 2)]) is is_over


def test_a_held_write_that_fails_ends_its_room() -> None:
    wire, _, inner = stressed(held=0.0)
    legs(wire, 2)

    def breaks(*_: object, **__: object) -> None:
        raise TransferError("decode-0 is gone")

    inner.write = breaks  # type: ignore[method-assign,assignment]
    assert wire.receive() == [("decode-0", Abort(room=2, attempt=0, generation=1, reason="decode-0 is gone"))]


def test_one_request_is_held_for_ever_and_the_history_knows_why() -> None:
    plan = replace(PLAN, requests=40)
    shape, load = work_of(plan)
    endless = set()
    for variant in range(20):
        history = History(keep=True)
        faults = Faults(load.jobs, shape, history.emit, PDTransfer().table.variant(variant))
        stalls = Stalls(load.jobs, shape, faults, history.emit, variant, aux=True, paths={})
        held = {
            job.request: seconds
            for job in load.jobs
            for leg in ("kv", "state", "aux", "seal")
            if (seconds := stalls.held_s(leg, Ticket(job.request, 1, job.request))) is not None
        }
        assert set(held) == stalls.told and len(held) > 8 and not any(map(faults.has, held))
        (forever,) = [request for request, seconds in held.items() if seconds == float("inf")]
        assert {*held.values()} == {HELD_S, float("inf")} and forever % 4 >= 2
        assert [event.request for event in history.events if isinstance(event, Faulted)] == [forever]
        endless.add(forever)
    assert len(endless) > 1


def test_on_an_asynchronous_path_a_leg_is_late_once_in_place_of_being_held() -> None:
    """The request that is held for ever is held on every path: nothing of it is reported."""
    plan = replace(PLAN, requests=40)
    shape, load = work_of(plan)
    for variant in range(6):
        faults = Faults(load.jobs, shape, History().emit, PDTransfer().table.variant(variant))
        paths = dict.fromkeys(LEGS, "async")
        usual, late = (
            Stalls(load.jobs, shape, faults, History().emit, variant, aux=True, paths=each) for each in ({}, paths)
        )
        tickets = [(leg, Ticket(job.request, 1, job.request)) for job in load.jobs for leg in LEGS]
        held = {each: usual.held_s(*each) for each in tickets if usual.held_s(*each) is not None}
        assert not any(usual.late_s(*each) for each in tickets)
        found = {each: seconds for each in tickets if (seconds := late.late_s(*each))}
        assert not any(late.late_s(*each) for each in tickets), "the second time"
        assert found == {each: seconds for each, seconds in held.items() if seconds != math.inf} != {}
        assert {late.held_s(*each) for each in tickets} == {None, math.inf}
