"""Results of generated edits: what found them, what is missing, and their table."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, to_plain
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from tools.mutation import trial
from tools.mutation.edits import all_edits, edits_of, read_sources
from tools.mutation.equivalent import LEFT, LIST, explained, read_equivalent, reasons_for
from tools.mutation.results import Campaign, Result, ResultFile, read_results

CAMPAIGN = Campaign(code="0123", seed=1, schedules=24, cpu_s=10.0)
CELL = "hicache/llama-3-tiny"
FIRST = Plan(scenario="hicache", shape="llama-3-tiny")
TRACED = 4


def result(name: str, outcome: str = "killed", **values: object) -> Result:
    made = Result(
        id=name,
        file="core/cache/a.py",
        line_number=3,
        function="f",
        operator="drop-not",
        diff="-a\n+b",
        outcome=outcome,
    )
    return dataclasses.replace(made, **values)  # type: ignore[arg-type]


def test_results_are_read_as_they_were_kept(tmp_path: Path) -> None:
    kept = ResultFile(tmp_path)
    assert kept.open(CAMPAIGN) == {}
    rows = [
        result("one", kinds=("content KV102",), cells={"hicache/llama-3-tiny": 2}, expect=("KV102",)),
        result("two", "survived", message="ä\u2028"),
    ]
    for row in rows:
        kept.add(row)
    assert ResultFile(tmp_path).open(CAMPAIGN) == {"one": rows[0], "two": rows[1]}
    assert read_results(tmp_path) == read_results(tmp_path / "results.jsonl")


def test_a_line_that_was_cut_short_is_judged_again(tmp_path: Path) -> None:
    kept = ResultFile(tmp_path)
    kept.open(CAMPAIGN)
    kept.add(result("one"))
    kept.add(result("two"))
    text = kept.path.read_bytes()
    kept.path.write_bytes(text[:-7])
    assert [*ResultFile(tmp_path).open(CAMPAIGN)] == ["one"]
    kept.add(result("three"))
    assert [*ResultFile(tmp_path).open(CAMPAIGN)] == ["one", "three"], "the next line begins a line"


def test_results_of_another_campaign_are_refused(tmp_path: Path) -> None:
    ResultFile(tmp_path).open(CAMPAIGN)
    with pytest.raises(UsageError, match="--again"):
        ResultFile(tmp_path).open(dataclasses.replace(CAMPAIGN, seed=2))


@pytest.mark.parametrize("text", ["", "{}\n", "nothing\n", "[]\n", '{"result": {"id": 1}}\n'])
def test_what_are_no_results_is_a_usage_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match="expected"):
        read_results(path)


@pytest.mark.parametrize(
    ("outcome", "expect", "is_expected"),
    [
        ("killed", (), True),
        ("killed", ("KV101", "KV102"), True),
        ("killed", ("KV101",), False),
        ("survived", ("KV102",), False),
    ],
)
def test_a_kill_is_as_expected_if_its_code_is(outcome: str, expect: tuple[str, ...], is_expected: bool) -> None:
    assert result("one", outcome, code="KV102", expect=expect).is_expected == is_expected


def test_the_list_of_equivalent_edits_needs_arguments_and_known_ids(tmp_path: Path) -> None:
    edits = {"a.py": edits_of("a.py", "def f(a):\n    return not a\n", frozenset())}
    (edit,) = edits["a.py"]
    path = tmp_path / "list.toml"
    path.write_text(f'["a.py"]\n{edit.id} = "f is never called"\n["b.py"]\nabc = "of another file"\n')
    assert reasons_for(edits, path) == {edit.id: "f is never called"}
    path.write_text('["a.py"]\nabc = "the bound is never met"\n')
    with pytest.raises(UsageError, match=r"of a\.py, got abc; remove"):
        reasons_for(edits, path)
    for text in ('["a.py"]\nabc = ""\n', '["a.py"\n', '["a.py"]\nabc = 3\n', "abc = 'text'\n"):
        path.write_text(text)
        with pytest.raises(UsageError, match="expected"):
            read_equivalent(path)


def test_every_listed_edit_is_one_of_the_source_as_it_is() -> None:
    equivalent, left = (read_equivalent(path) for path in (LIST, LEFT))
    every = all_edits(read_sources(), sorted({*equivalent, *left}))
    for path, listed in ((LIST, equivalent), (LEFT, left)):
        assert sorted(reasons_for(every, path)) == sorted(name for rows in listed.values() for name in rows)
    both = set(reasons_for(every, LIST)) & set(reasons_for(every, LEFT))
    assert not both, "an equivalent edit is no survivor"


@pytest.mark.parametrize(
    ("name", "outcome", "expected", "reason"),
    [
        ("e", "survived", "equivalent", "nobody reads it"),
        ("a", "survived", "legal", "a legal choice: either will do"),
        ("a", "crash", "crash", "a legal choice: either will do"),
        ("b", "survived", "survived", "it only costs time"),
        ("c", "survived", "survived", ""),
        ("a", "killed", "killed", ""),
        ("a", "unclear", "unclear", ""),
        ("e", "killed", "killed", ""),
    ],
)
def test_a_survivor_has_its_reason_and_a_legal_choice_is_none(
    name: str, outcome: str, expected: str, reason: str
) -> None:
    left = {"a": "a legal choice: either will do", "b": "it only costs time"}
    told = explained(result(name, outcome), {"e": "nobody reads it"}, left)
    assert (told.outcome, told.reason) == (expected, reason)


def loads(number: int) -> Evidence:
    return Evidence(schedules=1, loads=number)


class FixedRunner:
    """Schedules with so many loads each; a schedule below 0 loads fails. What has no load is a gap."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows
        self.ran: list[int] = []

    def run(self, plan: Plan) -> Outcome:
        self.ran.append(plan.schedule)
        count = self.rows[plan.schedule]
        finding = Finding(code="KV102", oracle="content", message="", scenario="", shape="", schedule="", replay="")
        return Outcome(plan=plan, findings=(finding,) if count < 0 else (), evidence=loads(max(0, count)), digest=0)

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return None if total.loads else "nothing was loaded"


def judged(
    monkeypatch: pytest.MonkeyPatch, rows: list[int], usual: list[int], *, numbers: list[int], budget: int
) -> tuple[str, list[int]]:
    """The outcome, and the schedules that ran. budget: schedules that the CPU time is enough for."""
    runner = FixedRunner(rows)
    monkeypatch.setattr(trial, "ScheduleRunner", lambda *args, **kwargs: runner)
    monkeypatch.setattr(trial.time, "process_time", lambda: 0.0 if len(runner.ran) < budget else 99.0)
    runs = [(dataclasses.replace(FIRST, schedule=number).line(), 5.0) for number in numbers]
    cells = {CELL: {"evidence": [to_plain(loads(each)) for each in usual]}}
    said: list[dict[str, object]] = []
    trial.judge(said.append, runs=runs, cells=cells, cpu_s=10.0, stuck_cpu_s=1.0)
    return str(said[-1]["outcome"]), runner.ran


def test_evidence_that_the_code_as_it_is_has_and_the_edit_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = judged(monkeypatch, [0] * 6, [1, 1, 1, 1], numbers=[0, 1, 2, 3, 4, 5], budget=1)
    assert found == ("unknown", [0, 1, 2, 3]), "all that were surveyed run before it is said"


def test_evidence_that_comes_later_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0, 0, 2, 0], [1, 1, 1, 1], numbers=[0, 1, 2, 3], budget=1)[0] == "survived"


def test_evidence_that_is_usually_missing_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0] * 4, [0, 0, 0, 1], numbers=[0, 1, 2, 3], budget=2) == ("survived", [0, 1])
    assert judged(monkeypatch, [0] * 4, [0] * 4, numbers=[0, 1, 2, 3], budget=9)[0] == "survived"


def test_schedules_that_miss_the_edit_keep_their_evidence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [9, 0, 9, 0], [1, 1, 1, 1], numbers=[1, 3], budget=9) == ("survived", [1, 3])


def test_a_finding_on_the_way_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, [0, 0, -1, 0], [1, 1, 1, 1], numbers=[0, 1, 2, 3], budget=1) == ("killed", [0, 1, 2])
