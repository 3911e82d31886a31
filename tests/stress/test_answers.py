"""Strategy "answers": what is asked for runs, what is not asked for does not, and each choice has a lasting name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from itertools import combinations

import pytest

from kvcheck.commands.options import check_plan
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Verdict
from kvcheck.core.cache.backend.backend import Operation, Signal
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.turns import Exploration, answers_text, parse_answers
from kvcheck.core.stress.answers import AnswersStrategy, answers
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.strategies import Draw
from kvcheck.core.stress.targets.builtin import BuiltinTarget


class Program:
    """A process whose operations note in `ran` that they have run."""

    def __init__(self, says_no: Callable[[str], bool] = lambda name: False) -> None:
        self.strategy = AnswersStrategy(says_no)
        self.backend = SimulatedBackend(self.strategy)
        self.ran: list[str] = []

    def submit(self, name: str, lane: str, *after: Signal) -> Signal:
        work = Operation(name, (lambda: self.ran.append(name),))
        return self.backend.submit(work, lane=self.backend.lane(lane), after=after)

    def pass_time(self) -> None:
        self.backend.query(self.backend.signal())


def test_yes_runs_what_is_asked_for_and_what_it_is_behind_and_nothing_else() -> None:
    program = Program()
    first = program.submit("first", "a")
    program.submit("beside", "c")
    second = program.submit("second", "b", first)
    program.submit("later", "b")
    assert program.ran == []
    assert program.backend.query(second)
    assert program.ran == ["first", "second"]
    program.backend.drain()
    assert program.ran == ["first", "second", "beside", "later"]


def test_no_runs_nothing_and_the_next_question_is_another_one() -> None:
    program = Program(lambda name: name == "0")
    signal = program.submit("copy", "a")
    assert not program.backend.query(signal)
    assert program.ran == []
    assert program.backend.query(signal)
    assert (program.strategy.asked, program.strategy.refused) == (["0", "1"], ["0"])
    assert program.backend.refused == [0]


def test_a_reached_record_is_no_choice_but_its_question_has_a_number() -> None:
    program = Program(lambda name: True)
    signal = program.submit("copy", "a")
    program.backend.wait(signal)
    assert program.backend.query(signal)
    assert not program.backend.query(program.submit("other", "a"))
    assert program.strategy.asked == ["1"]


def test_a_wait_runs_what_it_needs_alone() -> None:
    program = Program(lambda name: True)
    program.submit("beside", "a")
    program.backend.wait(program.submit("needed", "b"))
    assert program.ran == ["needed"]


def test_a_message_lands_when_time_passes_with_all_that_it_is_behind() -> None:
    program = Program()
    written = program.submit("write", "p>d:ordered")
    program.submit("message", "p>d:message", written)
    program.submit("copy", "d2h")
    assert program.ran == []
    program.pass_time()
    assert program.ran == ["write", "message"]
    assert program.strategy.asked == ["m2"]


def test_a_message_that_is_held_lands_after_one_more_turn_of_each_receiver() -> None:
    program = Program(lambda name: name == "m1")
    program.submit("late", "p>d:message")
    program.submit("prompt", "d>p:message")
    program.pass_time()
    assert program.ran == ["prompt"]
    program.pass_time()
    program.pass_time()
    assert program.ran == ["prompt", "late"]
    assert program.strategy.asked == ["m1", "m2"]


def test_a_write_to_the_store_lands_at_once_or_when_it_is_asked_for() -> None:
    prompt, late = Program(), Program(lambda name: name == "m1")
    for program, expected in ((prompt, ["put"]), (late, [])):
        put = program.submit("put", "storage")
        program.pass_time()
        assert program.ran == expected
        program.backend.wait(put)
        assert program.ran == ["put"]
    assert late.strategy.asked == late.strategy.refused == ["m1"]


def test_messages_land_oldest_first_whichever_lane_they_are_on() -> None:
    program = Program()
    for name, lane in (("1", "b>d:message"), ("2", "a>d:message"), ("3", "b>d:message"), ("4", "a>d:copies")):
        program.submit(name, lane)
    program.pass_time()
    assert program.ran == ["1", "2", "3", "4"]


def test_names_of_answers_survive_a_line_and_damaged_ones_are_refused() -> None:
    assert parse_answers(answers_text(("12", "m345"))) == ("12", "m345")
    assert parse_answers(answers_text(())) == ()
    for damaged in ("", "12..3", "m", "x12", "1 2", "-1", "01"):
        with pytest.raises(UsageError, match="numbers of questions and messages"):
            parse_answers(damaged)


def test_chance_is_a_function_of_seed_and_schedule() -> None:
    def drawn(seed: int, schedule: int) -> list[bool]:
        strategy = answers(Draw(seed=seed, schedule=schedule, choices=None))
        return [strategy._says_no(str(at)) for at in range(64)]

    assert drawn(1, 2) == drawn(1, 2)
    assert len({tuple(drawn(1, number)) for number in range(20)}) == 20


def explored(asked: Callable[[tuple[str, ...]], tuple[str, ...]], *, within: int) -> list[tuple[str, ...]]:
    """The "no" answers of all runs of one workload, in which a run with such answers is asked that."""
    first = Plan(scenario="retract-resume", shape="llama-3-micro", seed=1, schedule=4)
    exploration, runs = Exploration(first, workloads=1, within=within), []
    while (plan := exploration.next()) is not None:
        assert (plan.schedule, plan.strategy) == (4, "answers")
        assert plan.choices is not None
        refused = parse_answers(plan.choices)
        runs.append(refused)
        assert exploration.took(refused, asked(refused), hash(refused))
    assert exploration.gap is None and f"within {within} answer" in str(exploration.scope)
    return runs


@pytest.mark.parametrize("within", range(4))
def test_each_set_of_answers_is_run_once(within: int) -> None:
    numbers = tuple(map(str, range(5)))
    runs = explored(lambda refused: numbers, within=within)
    assert sorted(runs) == sorted(set(runs))
    assert set(runs) == {each for size in range(within + 1) for each in combinations(numbers, size)}


def test_questions_that_only_a_deviation_leads_to_are_answered_otherwise_too() -> None:
    def asked(refused: tuple[str, ...]) -> tuple[str, ...]:
        return ("1", "2", "7") if refused[:1] == ("2",) else ("1", "2")

    assert set(explored(asked, within=2)) == {(), ("1",), ("2",), ("1", "2"), ("2", "7")}


def test_what_was_not_run_is_no_part_of_the_scope() -> None:
    first = Plan(scenario="retract-resume", shape="llama-3-micro", seed=1)
    exploration = Exploration(first, workloads=2, within=1)
    assert exploration.next() is not None
    exploration.took((), ("3", "5"), 1)
    assert exploration.scope is None
    assert "0 of 2 workloads" in str(exploration.gap) and "2 schedules or more are left" in str(exploration.gap)


@pytest.mark.schedules
@pytest.mark.parametrize(
    "cell", ["retract-resume/glm-5.1", "hicache/glm-5.1", "pd-transfer/llama-3", "nvlink-aux/llama-3"]
)
def test_yes_to_everything_is_the_host_trace_of_the_eager_order(cell: str) -> None:
    runner = ScheduleRunner(BuiltinTarget())
    scenario, _, shape = cell.partition("/")
    for number in (0, 3):
        plan = Plan(scenario=scenario, shape=f"{shape}-micro", seed=1, schedule=number, strategy="eager")
        told = runner.run(plan)
        same = runner.run(dataclasses.replace(plan, strategy="answers", choices="none"))
        assert told.verdict is same.verdict is Verdict.PASS
        assert (told.refused, same.trace) == ((), told.trace)
        assert len(same.asked) > 1


@pytest.mark.schedules
def test_answers_that_cannot_be_given_are_told() -> None:
    plan = Plan(scenario="retract-resume", shape="llama-3-micro", seed=1, strategy="answers", choices="0.99999")
    outcome = ScheduleRunner(BuiltinTarget()).run(plan)
    assert "could not be given" in str(outcome.divergence) and outcome.verdict is Verdict.UNKNOWN


@pytest.mark.schedules
def test_without_extras_the_schedule_is_the_same() -> None:
    plan = parse_line("hicache:shape=llama-3-micro,strategy=answers,seed=1,schedule=30,requests=2,choices=none")
    runner = ScheduleRunner(BuiltinTarget())
    whole, bare = runner.run(plan), runner.run(dataclasses.replace(plan, extras="no"))
    assert (whole.trace, whole.asked, whole.findings) == (bare.trace, bare.asked, bare.findings)
    assert whole.judged["audit"] and "audit" not in bare.judged


@pytest.mark.parametrize(("extras", "strategy"), [("yes", "answers"), ("no", "eager")])
def test_extras_are_left_out_of_schedules_of_answers_alone(extras: str, strategy: str) -> None:
    plan = Plan(scenario="hicache", shape="llama-3-micro", strategy=strategy, extras=extras)
    with pytest.raises(UsageError, match="extras: expected no, beside strategy=answers; got"):
        check_plan(plan)


def test_what_does_not_depend_on_the_order_is_tried_by_the_first_schedule_of_a_workload() -> None:
    exploration = Exploration(Plan(scenario="hicache", shape="llama-3-micro"), workloads=1, within=1)
    first = exploration.next()
    assert first is not None and first.extras is None
    exploration.took((), ("3",), 1)
    second = exploration.next()
    assert second is not None and (second.choices, second.extras) == ("3", "no")


@pytest.mark.schedules
@pytest.mark.parametrize("number", [11, 27, 44])
def test_what_late_messages_once_made_of_the_fixed_build_passes(number: int) -> None:
    """The rank that gave a request up was heard behind its peer; and an abort was said to end what was over there."""
    plan = Plan(scenario="nvlink-aux", shape="llama-3-fp8-micro", strategy="answers", seed=1, schedule=number)
    assert ScheduleRunner(BuiltinTarget()).run(plan).findings == ()
