"""Results: kept line by line, read again after a cut, and refused where they are another campaign's."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from tools.mutation.edits import all_edits, edits_of, read_sources
from tools.mutation.equivalent import LEFT, LIST, explained, read_equivalent, reasons_for
from tools.mutation.results import Campaign, Result, ResultFile, read_results

CAMPAIGN = Campaign(code="0123", seed=1, schedules=24, cpu_s=10.0)


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
