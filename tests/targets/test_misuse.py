"""Illegal calls: what counts as refused, that every row holds on the code as it is, and that schedules do not notice.

Invariants:
- A subject is a few lines that are right, or wrong in one way.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from kvcheck.core.base.errors import CheckFailed, DoubleFree, LengthMismatch, UnknownVerdict
from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.pools.allocator import IdAllocator
from kvcheck.core.stress.runner import Outcome, ScheduleRunner
from kvcheck.core.stress.scenarios import serving
from kvcheck.core.stress.scenarios.misuser import ENGINE_PACE, PACE, Misuser, misuser_of
from kvcheck.core.stress.schedule import STRIDE, Plan
from kvcheck.core.targets.builtin import BuiltinTarget
from kvcheck.core.targets.misuse import Misuses, misuses
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse
from kvcheck.core.targets.misuse.folders import folder_attempts
from kvcheck.core.targets.parts import FIXED
from kvcheck.core.workload.events import Event, Misused
from kvcheck.core.workload.shapes import TINY_SHAPES, shape


def attempt(name: str, error: type[Exception] | None, call: Callable[[], object]) -> Attempt:
    """A call of nothing in particular, which changes nothing."""
    return Attempt(name, error, call, lambda: None)


class Counter:
    """Takes numbers from 1 to 3, and counts the calls that it took."""

    def __init__(self) -> None:
        self.taken = 0

    def right(self, number: int) -> None:
        """Refuses what it has to, before anything changes."""
        if not 1 <= number <= 3:
            raise LengthMismatch(f"expected 1 to 3, got {number}")
        self.taken += 1

    def late(self, number: int) -> None:
        """Refuses after a change."""
        self.taken += 1
        if not 1 <= number <= 3:
            raise LengthMismatch(f"expected 1 to 3, got {number}")

    def by_luck(self, number: int) -> None:
        """Has no check, and stumbles."""
        self.taken += [0, 0, 0][number - 1] + 1

    def shifted(self, number: int) -> None:
        """Its bound is off by one."""
        if not 1 <= number <= 4:
            raise LengthMismatch(f"expected 1 to 4, got {number}")
        self.taken += 1

    def narrow(self, number: int) -> None:
        """Its bound is off by one the other way."""
        if not 1 <= number <= 2:
            raise LengthMismatch(f"expected 1 to 2, got {number}")
        self.taken += 1


def tried(call: Callable[[Counter, int], None], number: int, error: type[Exception] | None) -> object:
    """What comes of a call of a counter with a number."""
    row: Misuse[Counter] = Misuse("a number", error, lambda counter: call(counter, number))
    return row.on(Counter(), lambda counter: counter.taken).make()


@pytest.mark.parametrize("number", [0, 4])
def test_a_call_that_is_refused_without_a_change_is_right(number: int) -> None:
    assert tried(Counter.right, number, LengthMismatch) is None


@pytest.mark.parametrize("number", [1, 3])
def test_a_call_at_the_edge_that_is_accepted_is_right(number: int) -> None:
    assert tried(Counter.right, number, None) is None


@pytest.mark.parametrize(
    ("call", "number", "error", "told"),
    [
        (Counter.shifted, 4, LengthMismatch, "it was accepted"),
        (Counter.by_luck, 5, LengthMismatch, "IndexError"),
        (Counter.right, 4, DoubleFree, "LengthMismatch: expected 1 to 3, got 4"),
        (Counter.late, 4, LengthMismatch, "it changed something: 0 became 1"),
        (Counter.narrow, 3, None, "LengthMismatch: expected 1 to 2, got 3"),
    ],
)
def test_a_call_that_is_not_refused_as_it_has_to_be_is_told(
    call: Callable[[Counter, int], None], number: int, error: type[Exception] | None, told: str
) -> None:
    found = tried(call, number, error)
    assert isinstance(found, str) and found.startswith("a number: expected ") and told in found


def test_a_legal_call_with_a_wrong_result_is_told() -> None:
    found = attempt("a sum", None, lambda: 1 + 1 == 3).make()
    assert found == "a sum: expected that it is allowed and gives the right result; got: that is not so"


def test_a_call_for_which_there_is_no_state_is_no_refusal() -> None:
    assert attempt("nothing", DoubleFree, lambda: NOT_NOW).make() is NOT_NOW


def test_a_subject_that_cannot_be_made_is_told() -> None:
    def unmade() -> None:
        raise DoubleFree("no subject")

    found = Attempt("a call", DoubleFree, lambda: None, unmade).make()
    assert found == "a call: expected DoubleFree, no change; got: DoubleFree: no subject"


def test_a_machine_without_room_is_no_refusal_and_no_finding() -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "no space")

    with pytest.raises(UnknownVerdict, match="disk space"):
        attempt("a folder", DoubleFree, full).make()


def half_of(name: str, half: int, *, is_pair: bool) -> Misuses:
    """Half of the rows that there are, for a shape."""
    allocators = (IdAllocator("device", count=3), IdAllocator("host", count=3, first=0))
    for each in allocators:
        each.allocate(2, 5)
    cached, store = PrefixTree(shape(name).page_size), MemoryStore()
    return misuses(
        FIXED,
        shape(name),
        half,
        allocators=allocators,
        cached=cached,
        has_host=True,
        store=store,
        is_pair=is_pair,
    )


@pytest.mark.parametrize("is_pair", [False, True])
@pytest.mark.parametrize("name", TINY_SHAPES)
@pytest.mark.parametrize("half", [0, 1])
def test_every_check_holds_on_the_code_as_it_is(name: str, is_pair: bool, half: int) -> None:
    made = half_of(name, half, is_pair=is_pair)
    for each in (*made.once, *made.once[::-1], *made.always):
        assert each.make() in (None, NOT_NOW)


def test_every_check_of_a_store_in_a_folder_holds() -> None:
    assert [each.make() for each in folder_attempts()] == [None] * len(folder_attempts())


def test_names_tell_the_calls_apart() -> None:
    names = [each.name for half in (0, 1) for each in half_of("llama-3-tiny", half, is_pair=True).once]
    repeated = {name for name in names if names.count(name) > 2}  # ids begin at 0 and at 1
    assert not repeated


def rounds(misuser: Misuser, count: int) -> None:
    """So many rounds."""
    for _ in range(count):
        misuser()


def test_a_few_prepared_calls_are_made_a_round_and_the_rest_at_the_end() -> None:
    made: list[int] = []
    rows = tuple(attempt(str(at), None, partial(made.append, at)) for at in range(2 * PACE + 1))
    events: list[Event] = []
    misuser = Misuser(Misuses(rows, ()), events.append, turn=0)
    misuser()
    assert (made, events) == ([*range(PACE)], [Misused(PACE)])
    misuser.finish()
    misuser.finish()
    assert (made, events) == ([*range(2 * PACE + 1)], [Misused(PACE), Misused(PACE + 1)])


def test_two_schedules_in_a_row_make_the_calls_of_both_halves() -> None:
    asked: list[int] = []

    class Engine:
        """Notes which half it is asked for."""

        def misuses(self, half: int) -> Misuses:
            asked.append(half)
            return Misuses((), ())

    for schedule in (6, 7):
        misuser_of(Engine(), lambda event: None, schedule * STRIDE + 3)
    assert asked == [0, 1]


def test_a_call_that_is_let_through_ends_the_schedule() -> None:
    wrong = attempt("anything", DoubleFree, lambda: None)
    with pytest.raises(CheckFailed, match="anything: expected DoubleFree, no change; got: it was accepted"):
        rounds(Misuser(Misuses((), (wrong,)), lambda event: None, turn=0), ENGINE_PACE)


def test_a_prepared_call_that_is_let_through_is_told_at_the_end() -> None:
    events: list[Event] = []
    wrong = [attempt(name, DoubleFree, lambda: None) for name in ("first", "second", "third")]
    misuser = Misuser(Misuses(tuple(wrong), ()), events.append, turn=0)
    misuser()
    with pytest.raises(CheckFailed, match=r"^first: expected .*it was accepted; 2 more calls are wrong$"):
        misuser.finish()
    assert not events


def test_calls_on_an_engine_pass_over_those_that_have_no_state() -> None:
    events: list[Event] = []
    none = attempt("nothing", DoubleFree, lambda: NOT_NOW)
    once = attempt("something", None, lambda: None)
    misuser = Misuser(Misuses((), (none, once)), events.append, turn=1)
    rounds(misuser, ENGINE_PACE)
    assert events == [Misused(1)]


def outcome(plan: Plan) -> tuple[Outcome, int]:
    """A schedule, and how many events of other kinds than Misused it has."""
    told = [0]

    def count(event: Misused) -> None:
        told[0] += 1

    made = ScheduleRunner(BuiltinTarget()).run(plan, handlers=((Misused, count),))
    return made, made.evidence.events - told[0]


@pytest.mark.schedules
@pytest.mark.parametrize("scenario", ["retract-resume", "hicache", "pd-transfer"])
def test_a_schedule_is_the_same_with_illegal_calls_and_without(scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(scenario=scenario, shape="llama-3-tiny", strategy="random", schedule=1)
    with_calls, events = outcome(plan)
    assert with_calls.verdict is Verdict.PASS
    assert (with_calls.evidence.refusals or 0) > 150
    monkeypatch.setattr(serving, "Misusable", type("Nobody", (), {}))
    without, events_without = outcome(plan)
    assert without.evidence.refusals is None
    assert events == events_without
    assert replace(with_calls.evidence, refusals=None, events=0) == replace(without.evidence, events=0)
