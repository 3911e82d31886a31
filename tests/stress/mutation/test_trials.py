"""Trials: edits that are killed, survive, loop, die or cannot be imported, each judged by a real server of trials.

Invariants:
- Every text is put into the cache as an edit would be; the files stay as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.stress.mutation.campaign import Judge, Subject
from kvcheck.core.stress.mutation.edits import package_folder
from kvcheck.core.stress.mutation.pool import ServerPool
from kvcheck.core.stress.mutation.pristine import Pristine, cells_of, code_of
from kvcheck.core.stress.mutation.results import Result

pytestmark = [pytest.mark.processes, pytest.mark.schedules]

CELL = "retract-resume/llama-3-tiny"
OFFLOAD = "core/cache/offload.py"
SCHEDULES = 3
SAVE = "    def save("


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the survey of the cell is kept for all tests."""
    return tmp_path_factory.mktemp("pristine")


@pytest.fixture
def pristine(folder: Path) -> Pristine:
    cells = cells_of(1, ["retract-resume"], ["llama-3-tiny"])
    return Pristine(folder, cells, code=code_of(package_folder()), schedules=SCHEDULES, traced=2)


@pytest.fixture
def pool() -> Iterator[ServerPool]:
    with ServerPool(1) as pool:
        yield pool


def texts(file: str, *changes: tuple[str, str]) -> Mapping[str, str]:
    """A file's text with each old text, which is there once, replaced."""
    text = (package_folder() / file).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return {file: text}


def subject(name: str, texts: Mapping[str, str], reached: int = 0b11, **values: str) -> Subject:
    made = Result(id=name, file=OFFLOAD, line_number=1, function="", operator="", diff="", outcome="unreached")
    return Subject(result=made, texts=texts, reached={CELL: reached} if reached else {}, **values)  # type: ignore[arg-type]


def body(statement: str) -> Mapping[str, str]:
    """Offload.save that begins with a statement."""
    text = (package_folder() / OFFLOAD).read_text()
    at = text.index(SAVE)
    opening = text.index('"""', at)
    end = text.index('"""', opening + 3) + 3
    return {OFFLOAD: f"{text[:end]}\n        {statement}{text[end:]}"}


def test_each_edit_ends_as_it_must(pool: ServerPool, pristine: Pristine, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ENDLESS_LEAST_S", 2.5), ("ENDLESS_TIMES", 1), ("STUCK_CPU_S", 0.5), ("SPARE_CPU_S", 1.0)):
        monkeypatch.setattr(f"kvcheck.core.stress.mutation.campaign.{name}", value)
    assert [*pristine.survey(pool)] == [CELL]
    judge = Judge(pool, pristine, schedules=SCHEDULES, cpu_s=2.0)
    found = {
        each.id: each
        for each in judge.results(
            [
                subject("as it is", texts(OFFLOAD)),
                subject("raises", body("raise ValueError('no')")),
                subject("loops", body("while True: pass")),
                subject("loops in C", body("sum(range(10**15))")),
                subject("dies", body("__import__('os')._exit(7)")),
                subject("segfaults", body("__import__('os').kill(__import__('os').getpid(), 11)")),
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
        "dies": "crash",
        "segfaults": "crash",
        "usage": "killed",
        "not imported": "invalid",
        "unreached": "unreached",
        "first schedule misses": "survived",
    }
    assert found["as it is"].cells == {CELL: SCHEDULES} and found["as it is"].cpu_s > 0
    assert found["loops"].code == "KV901" and "endless loop" in found["loops"].message
    assert "no signal handler" in found["loops in C"].message
    assert found["first schedule misses"].cells == {CELL: SCHEDULES - 1}
    raised = found["raises"]
    assert (raised.code, raised.line, raised.schedules) == ("KV902", pristine.plan(CELL, 0).line(), 1)
    assert "no" in raised.message and raised.kinds
    assert "signal 11" in found["segfaults"].message and "status 7" in found["dies"].message
    assert found["dies"].line == pristine.plan(CELL, 0).line(), "the plan that was running"
    assert found["usage"].code == "KV902"
    assert "undefined" in found["not imported"].message


def test_a_kill_in_a_schedule_that_was_not_traced_is_checked_on_the_code_as_it_is(
    pool: ServerPool, pristine: Pristine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*pristine.survey(pool)]
    judge = Judge(pool, pristine, schedules=SCHEDULES, cpu_s=20.0)
    asked: list[Mapping[str, object]] = []
    order = judge._order
    monkeypatch.setattr(judge, "_order", lambda *args: asked.append(made := order(*args)) or made)
    last = pristine.plan(CELL, SCHEDULES - 1).line()
    (found,) = judge.results([subject("raises", body("raise ValueError('no')"), earlier=last)])
    assert (found.outcome, found.line) == ("killed", last)
    assert [bool(each["texts"]) for each in asked] == [True, False], "the edit, then the code as it is"


def test_a_finding_that_the_code_as_it_is_has_too_is_no_kill(
    pool: ServerPool, pristine: Pristine, monkeypatch: pytest.MonkeyPatch
) -> None:
    [*pristine.survey(pool)]
    judge = Judge(pool, pristine, schedules=SCHEDULES, cpu_s=20.0)
    broken = body("raise ValueError('no')")
    order = judge._order
    monkeypatch.setattr(judge, "_order", lambda *args: {**order(*args), "texts": broken})
    last = pristine.plan(CELL, SCHEDULES - 1).line()
    (found,) = judge.results([subject("raises", broken, earlier=last)])
    assert (found.outcome, found.line) == ("unclear", last)
    assert "the code as it is fails this plan too: " in found.note


def test_a_server_that_dies_is_started_again(pool: ServerPool, pristine: Pristine) -> None:
    [*pristine.survey(pool)]
    judge = Judge(pool, pristine, schedules=1, cpu_s=20.0)
    kills_server = body("import os; os.kill(os.getppid(), 9); __import__('time').sleep(60)")
    found = [*judge.results([subject("kills its server", kills_server), subject("as it is", texts(OFFLOAD))])]
    assert [(each.id, each.outcome) for each in found] == [("kills its server", "crash"), ("as it is", "survived")]
    assert "signal 9" in found[0].message and found[0].line == pristine.plan(CELL, 0).line()


def test_a_survey_is_read_again_for_the_same_code_and_plan_alone(
    pool: ServerPool, pristine: Pristine, folder: Path
) -> None:
    [*pristine.survey(pool)]
    assert [*pristine.survey(pool)] == [], "it is kept"
    reach = pristine.reach()
    (cell,) = reach.cells
    assert cell.schedules == 2 and cell.cost > 100
    lines = cell.lines[OFFLOAD]
    assert lines and all(bits in (1, 2, 3) for bits in lines.values())
    assert "core/cache/hicache/cache.py" not in cell.lines
    judge = Judge(pool, pristine, schedules=2, cpu_s=1.0)
    mine, last = pristine.plan(CELL, 0).line(), pristine.plan(CELL, 1).line()
    for earlier in (last.replace("schedule=1", "schedule=2"), last.replace("seed=1", "seed=2"), "hicache:shape=x-tiny"):
        assert judge._lines(subject("", {}, earlier=earlier)) == [mine, last], "a plan of another run is left out"
    assert judge._lines(subject("", {}, earlier=last)) == [last, mine]
    for changed in ({"code": "other"}, {"traced": 1}, {"schedules": 2}):
        values = {"code": code_of(package_folder()), "schedules": SCHEDULES, "traced": 2, **changed}
        other = Pristine(folder, cells_of(1, ["retract-resume"], ["llama-3-tiny"]), **values)  # type: ignore[arg-type]
        assert other._read(next(iter(other._cells.values()))) is None


def test_code_that_fails_by_itself_ends_the_campaign(
    pool: ServerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(cells_of(1, ["retract-resume"], ["llama-3-tiny"])[0])
    pristine = Pristine(tmp_path, [plan], code="", schedules=1, traced=1)
    answers = pool.answers
    broken = body("raise ValueError('no')")
    monkeypatch.setattr(
        pool, "answers", lambda orders: answers(lambda: (made := orders()) and {**made, "texts": broken})
    )
    with pytest.raises(UnknownVerdict, match="kvcheck replay retract-resume:shape=llama-3-tiny"):
        [*pristine.survey(pool)]
