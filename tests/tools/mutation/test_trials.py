"""Trials: edits that are killed, survive, loop, die or cannot be imported, each judged in a forked process."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UnknownVerdict
from tools.mutation.campaign import Judge, Subject
from tools.mutation.edits import PACKAGE
from tools.mutation.forks import Forks, Order
from tools.mutation.reach import Reach
from tools.mutation.results import Result
from tools.mutation.survey import Survey, cells_of, code_of

pytestmark = [pytest.mark.processes, pytest.mark.schedules]

CELL = "retract-resume/llama-3-tiny"
OFFLOAD = "core/cache/offload.py"
SCHEDULES = 3
SAVE = "    def save("


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the survey of the cell is kept for all tests."""
    return tmp_path_factory.mktemp("survey")


@pytest.fixture
def forks() -> Iterator[Forks]:
    yield Forks(2)
    gc.unfreeze()


@pytest.fixture
def survey(folder: Path, forks: Forks) -> Survey:
    made = Survey(folder, cells(), code=code_of(), schedules=SCHEDULES, traced=2)
    assert [*made.run(forks)] in ([CELL], []), "the first test surveys it"
    return made


def cells() -> list[object]:
    return cells_of(1, ["retract-resume"], ["llama-3-tiny"])


def texts(file: str, *changes: tuple[str, str]) -> Mapping[str, str]:
    """A file's text with each old text, which is there once, replaced."""
    text = (PACKAGE / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {file: text}


def subject(name: str, texts: Mapping[str, str], reached: int = 0b11, earlier: str = "") -> Subject:
    made = Result(id=name, file=OFFLOAD, line_number=1, function="", operator="", diff="", outcome="unreached")
    return Subject(result=made, texts=texts, reached={CELL: reached} if reached else {}, earlier=earlier)


def body(statement: str) -> Mapping[str, str]:
    """Offload.save that begins with a statement."""
    text = (PACKAGE / OFFLOAD).read_text()
    at = text.index(SAVE)
    opening = text.index('"""', at)
    end = text.index('"""', opening + 3) + 3
    return {OFFLOAD: f"{text[:end]}\n        {statement}{text[end:]}"}


def test_each_edit_ends_as_it_must(forks: Forks, survey: Survey, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDLESS_LEAST_S", 2.5), ("ENDLESS_TIMES", 1), ("STUCK_CPU_S", 0.5), ("SPARE_CPU_S", 1.0)):
        monkeypatch.setattr(f"tools.mutation.campaign.{name}", value)
    for name, value in (("LOOK_S", 0.2), ("STALLED_S", 2.0)):
        monkeypatch.setattr(f"tools.mutation.forks.{name}", value)
    judge = Judge(forks, survey, schedules=SCHEDULES, cpu_s=2.0)
    found = {
        each.id: each
        for each in judge.results(
            [
                subject("as it is", texts(OFFLOAD)),
                subject("raises", body("raise ValueError('no')")),
                subject("loops", body("while True: pass")),
                subject("loops in C", body("sum(range(10**15))")),
                subject("waits", body("__import__('time').sleep(60)")),
                subject("dies", body("__import__('os')._exit(7)")),
                subject("is ended", body("__import__('os').kill(__import__('os').getpid(), 9)")),
                subject("usage", body("from kvcheck.core.base.errors import UsageError; raise UsageError('no')")),
                subject("not imported", {OFFLOAD: "x = undefined\n"}),
                subject("unreached", {}, reached=0),
                subject("first schedule misses", texts(OFFLOAD), reached=0b10),
            ]
        )
    }
    assert {name: each.outcome for name, each in found.items()} == {
        "as it is": "survived",
        "raises": "killed",
        "loops": "killed",
        "loops in C": "hang",
        "waits": "hang",
        "dies": "crash",
        "is ended": "crash",
        "usage": "killed",
        "not imported": "invalid",
        "unreached": "unreached",
        "first schedule misses": "survived",
    }
    assert found["as it is"].cells == {CELL: SCHEDULES} and found["as it is"].cpu_s > 0
    assert found["loops"].code == "KV901" and "endless loop" in found["loops"].message
    assert "no signal handler" in found["loops in C"].message and "waited" in found["waits"].message
    assert found["first schedule misses"].cells == {CELL: SCHEDULES - 1}
    raised = found["raises"]
    assert (raised.code, raised.line, raised.schedules) == ("KV902", survey.plan(CELL, 0).line(), 1)
    assert "no" in raised.message and raised.kinds
    assert "signal 9" in found["is ended"].message and "status 7" in found["dies"].message
    assert found["dies"].line == survey.plan(CELL, 0).line(), "the plan that was running"
    assert found["usage"].code == "KV902"
    assert "undefined" in found["not imported"].message


@pytest.mark.parametrize("is_clean", [True, False])
def test_a_kill_in_a_schedule_that_was_not_traced_is_checked_on_the_code_as_it_is(
    is_clean: bool, forks: Forks, survey: Survey, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = Judge(forks, survey, schedules=SCHEDULES, cpu_s=20.0)
    broken = body("raise ValueError('no')")
    ran: list[Order] = []
    answers = forks.answers

    def noted(orders: object) -> object:
        for order, answer in answers(orders):
            ran.append(order)
            yield order, answer

    monkeypatch.setattr(forks, "answers", noted)
    if not is_clean:  # the code as it is has the same fault
        order = judge._order
        monkeypatch.setattr(judge, "_order", lambda result, texts, lines: order(result, broken, lines))
    last = survey.plan(CELL, SCHEDULES - 1).line()
    (found,) = judge.results([subject("raises", broken, earlier=last)])
    assert (found.outcome, found.line) == ("killed" if is_clean else "unclear", last)
    assert [bool(each.texts) for each in ran] == [True, not is_clean], "the edit, then the code as it is"
    assert found.note.startswith("" if is_clean else "the code as it is fails this plan too: ")


def test_a_survey_is_read_again_for_the_same_code_and_plan_alone(forks: Forks, survey: Survey, folder: Path) -> None:
    assert [*survey.run(forks)] == [], "it is kept"
    judge = Judge(forks, survey, schedules=2, cpu_s=1.0)
    reach: Reach = judge.reach
    (cell,) = reach.cells
    assert cell.schedules == 2 and cell.cost > 100
    lines = cell.lines[OFFLOAD]
    assert lines and all(bits in (1, 2, 3) for bits in lines.values())
    assert "core/cache/hicache/cache.py" not in cell.lines
    mine, last = survey.plan(CELL, 0).line(), survey.plan(CELL, 1).line()
    for earlier in (last.replace("schedule=1", "schedule=9"), last.replace("seed=1", "seed=2"), "hicache:shape=x-tiny"):
        assert judge._lines(subject("", {}, earlier=earlier)) == [mine, last], "a plan of another run is left out"
    assert judge._lines(subject("", {}, earlier=last)) == [last, mine]
    for changed in ({"code": "other"}, {"traced": 1}, {"schedules": 2}):
        values = {"code": code_of(), "schedules": SCHEDULES, "traced": 2, **changed}
        other = Survey(folder, cells(), **values)
        assert other._read(next(iter(other._cells.values()))) is None


def test_code_that_fails_by_itself_ends_the_campaign(
    forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey = Survey(tmp_path, cells(), code="", schedules=1, traced=1)
    order = survey._order
    broken = body("raise ValueError('no')")
    monkeypatch.setattr(survey, "_order", lambda plan: dataclasses.replace(order(plan), texts=broken))
    with pytest.raises(UnknownVerdict, match="kvcheck replay retract-resume:shape=llama-3-tiny"):
        [*survey.run(forks)]
