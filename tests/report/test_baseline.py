"""Baselines: what a row covers, what becomes of each row, and files that people edit."""

from __future__ import annotations

import datetime
from dataclasses import replace
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from report.test_gate_result import gate
from rigs import ci_readers
from rigs.literal_record import FOREIGN, LINES, PASSED, RETRACT, SCENARIOS

from kvcheck.commands.gate import result_lines
from kvcheck.core.base.causes import place_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Coverage, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.ci import to_github, to_gitlab, to_junit, to_sarif
from kvcheck.core.report.ci.outcome import of_gate
from kvcheck.core.report.gate.baseline import BaselineEntry, BaselineResult, BaselineTable, judge_rows, known_by
from kvcheck.core.report.gate.baseline_file import add_rows, block, parse_baseline, read_baseline, remove_rows, rows_of
from kvcheck.core.report.gate.pages import markdown
from kvcheck.core.report.gate.pages import render as page
from kvcheck.core.report.gate.result import (
    GateResult,
    conditional_findings,
    evidence_problems,
    has_enough,
    integrity_problems,
)
from kvcheck.core.report.markdown import escaped

DAY = datetime.date(2027, 3, 1)
CODE = "3f2c1ab0" * 8
CELL = "retract-resume/glm-5.1-tiny"
ROW = BaselineEntry(
    number=1,
    kind=BaselineTable.FINDING,
    engine=None,
    cell=CELL,
    code="KV102",
    place="content: device index_k_with_scale",
    owner="kv team",
    reason="issue 7",
    expires=DAY,
)
EXPECTED = BaselineEntry(
    number=2,
    kind=BaselineTable.UNKNOWN,
    engine=None,
    cell="retract-resume/gpt-oss-tiny",
    says="no retraction in * schedules",
    owner="kv team",
    reason="issue 8",
    expires=DAY,
)


def run(*findings: Finding, unknown: bool = False, schedules: int = 400, warning: str = "") -> RunRecord:
    """A run of one cell that fails by these findings, or passes; and of one that is UNKNOWN, if asked for."""
    fails = any(each.condition is None for each in findings)
    verdict = Verdict.FAIL if fails else Verdict.PASS
    coverage = Coverage(wanted=400, floor=3)
    row = replace(SCENARIOS[0], verdict=verdict, code=None, schedules=schedules, coverage=coverage)
    row = replace(row, evidence=replace(RETRACT, schedules=schedules))
    rows = (row, *((replace(SCENARIOS[2], coverage=coverage),) if unknown else ()))
    evidence = row.evidence if not unknown else row.evidence.plus(SCENARIOS[2].evidence)
    worst = Verdict.worst(each.verdict for each in rows)
    return replace(
        PASSED,
        verdict=worst,
        exit_code=worst.exit_code,
        scenarios=rows,
        evidence=evidence,
        plan={"schedules": 400, "cells": [LINES[0], *((LINES[2],) if unknown else ())]},
        findings=tuple(replace(each, id=f"{PASSED.run_id}.{at}") for at, each in enumerate(findings, 1)),
        warnings=(warning,) if warning else (),
    )


def judged(
    *entries: BaselineEntry,
    record: RunRecord,
    day: datetime.date = DAY,
    strict: bool = False,
    conditional: bool = False,
) -> GateResult:
    """What the gate says of a run with these rows."""
    known = known_by(entries, [record], day)
    rows = judge_rows(entries, [record], day, partial(has_enough, min_schedules=None))
    return gate(
        record,
        fail_on_conditional=conditional,
        integrity=integrity_problems([record], fail_on_conditional=conditional, known=known),
        conditional=conditional_findings([record], known),
        evidence=evidence_problems([record], code=CODE, known=known),
        baseline=BaselineResult(file="known.toml", strict=strict, rows=rows),
    )


def statuses(result: GateResult) -> list[str]:
    assert result.baseline is not None
    return [row.status for row in result.baseline.rows]


def test_a_known_finding_and_an_expected_unknown_are_told_and_fail_nothing() -> None:
    result = judged(ROW, EXPECTED, record=run(FOREIGN, unknown=True))
    assert (result.exit_code, statuses(result)) == (0, ["known", "known"])
    assert (result.integrity, result.evidence) == ((), ())
    for text in ("\n".join(result_lines(result)), markdown(result), page(result)):
        assert "issue 7" in text and "kv team" in text


def junit_of(result: GateResult) -> dict[str, ElementTree.Element]:
    """The children that say the verdict of each case of a row, by the row's words."""
    suite = ci_readers.junit(to_junit.render(of_gate(result)))
    cases = [case for case in suite.findall("testcase") if case.get("classname") == "kvcheck.gate.baseline"]
    return {str(case.get("name")): case for case in cases}


def test_what_a_row_lets_pass_is_skipped_in_junit_with_its_owner_and_fails_nowhere() -> None:
    elsewhere = replace(ROW, number=3, engine="vllm")
    result = judged(ROW, EXPECTED, elsewhere, record=run(FOREIGN, unknown=True))
    suite = ci_readers.junit(to_junit.render(of_gate(result)))
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("0", "0", "2")
    cases = junit_of(result)
    assert list(cases) == [ROW.what, EXPECTED.what]
    skipped = cases[ROW.what].find("skipped")
    assert skipped is not None and "known: " in str(skipped.get("message"))
    assert "kv team, until 2027-03-01: issue 7" in str(skipped.get("message"))
    assert ci_readers.gitlab(to_gitlab.render(of_gate(result))) == []
    assert ci_readers.sarif(to_sarif.render(of_gate(result)))["results"] == []
    assert {level for level, _, _ in ci_readers.github(to_github._lines(of_gate(result)))} == {"notice"}
    assert f"| let pass | {escaped(ROW.what)} |" in to_github.summary(of_gate(result))


def test_a_row_to_mend_is_a_failure_in_every_format() -> None:
    result = judged(ROW, record=run(), strict=True)
    assert (result.exit_code, result.verdict) == (1, "FAIL")
    failure = junit_of(result)[ROW.what].find("failure")
    assert failure is not None and failure.get("type") == "gone row of the baseline"
    assert [entry["severity"] for entry in ci_readers.gitlab(to_gitlab.render(of_gate(result)))] == ["critical"]
    assert [each["kind"] for each in ci_readers.sarif(to_sarif.render(of_gate(result)))["results"]] == ["fail"]
    levels = [level for level, _, _ in ci_readers.github(to_github._lines(of_gate(result)))]
    assert levels == ["error", "notice"]
    undecided = junit_of(judged(ROW, record=run(schedules=2)))[ROW.what].find("skipped")
    assert undecided is not None and "undecided: " in str(undecided.get("message"))
    row = junit_of(judged(ROW, record=run()))[ROW.what]
    assert [child.tag for child in row] == ["system-out"], "one that is gone is no failure unless it is asked for"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"code": "KV104", "buffer": "index_k_with_scale"}, "another code"),
        ({"buffer": "latent"}, "another buffer"),
        ({"tier": "host"}, "another tier"),
        ({"oracle": "contract"}, "another rule"),
        ({"shape": "llama-3-tiny"}, "another cell"),
    ],
)
def test_a_new_finding_beside_a_known_one_fails(change: dict[str, str], why: str) -> None:
    result = judged(ROW, record=run(FOREIGN, replace(FOREIGN, **change)))  # type: ignore[arg-type]
    assert result.exit_code == 1, why
    (problem,) = result.integrity
    assert problem.trouble is not None and problem.trouble.replay == FOREIGN.replay
    assert problem.trouble.named.startswith(f"finding {PASSED.run_id}.2, place ")


def test_a_place_is_the_same_for_other_pages_requests_lines_and_runs() -> None:
    again = replace(FOREIGN, id="z.9", page=3, row=4, layer=1, request=70, seen_request=2, message="other numbers")
    assert place_of(again) == place_of(FOREIGN) == ROW.place
    error = replace(FOREIGN, oracle="liveness", code="KV902", buffer=None, tier=None)
    told = [replace(error, message=f"copy raised KeyError: {at} (a.b, line {at})\nmore") for at in (7, 123)]
    assert {place_of(each) for each in told} == {"liveness: copy raised KeyError: # (a.b, line #)"}
    race = replace(
        FOREIGN, oracle="ordering", minimal={"earlier": {"operation": "load"}, "later": {"operation": "read"}}
    )
    assert place_of(race) == "ordering: load before read"


def test_the_reader_names_a_place_for_an_engine_alone() -> None:
    line = "preemption:shape=scheduler.priority,target=vllm%3Aenvs/a,seed=1,schedule=0"
    of_engine = replace(FOREIGN, lane="get_index_k", schedule=line)
    assert place_of(of_engine) == "content: device index_k_with_scale, get_index_k"
    assert place_of(replace(FOREIGN, lane="h2d.1")) == place_of(FOREIGN)


def test_a_target_of_the_users_own_has_rows_of_its_own() -> None:
    line = "retract-resume:shape=glm-5.1-tiny,target=my.pool%3Aparts,seed=1,schedule=0"
    own = replace(FOREIGN, lane="h2d.1", schedule=line)
    assert place_of(own) == place_of(FOREIGN), "its lanes are queues of kvcheck"
    record = replace(run(own), plan={"schedules": 400, "cells": [line]})
    (row,) = rows_of(record, owner="me", reason="r", expires=DAY)
    assert row.engine == "my.pool:parts"
    assert row.covers(record, own) and not row.covers(run(FOREIGN), FOREIGN)


def test_a_symptom_goes_with_its_cause() -> None:
    symptom = replace(FOREIGN, code="KV501", oracle="output", cause=f"{PASSED.run_id}.1")
    assert judged(ROW, record=run(FOREIGN, symptom)).exit_code == 0
    assert judged(ROW, record=run(replace(FOREIGN, code="KV104"), replace(symptom, code="KV102"))).exit_code == 1


def test_a_row_of_a_conditional_finding_covers_no_other() -> None:
    latent = replace(FOREIGN, condition="the peers differ")
    row = replace(ROW, place=place_of(latent))
    assert row.place == "content: device index_k_with_scale (conditional)"
    assert judged(row, record=run(latent), conditional=True).exit_code == 0
    assert judged(ROW, record=run(latent), conditional=True).exit_code == 1
    assert judged(row, record=run(FOREIGN)).exit_code == 1


def test_a_cell_that_fails_without_a_finding_stays_a_failure() -> None:
    bare = replace(run(FOREIGN), findings=())
    assert judged(ROW, record=bare).exit_code == 1
    other = replace(run(FOREIGN), scenarios=(*run(FOREIGN).scenarios, replace(SCENARIOS[1], verdict=Verdict.FAIL)))
    (problem,) = judged(ROW, record=other).integrity
    assert problem.message.startswith("handover/<b>tiny</b> failed")


@pytest.mark.parametrize(
    "warning",
    [
        "more findings were made and are not in this record: 1",
        "1,000 more findings were made and are not in this record",  # as older records say it
    ],
)
def test_findings_that_a_record_lacks_may_be_new(warning: str) -> None:
    result = judged(ROW, record=run(FOREIGN, warning=warning))
    assert result.exit_code == 4
    assert "nobody knows whether they are known" in result.evidence[0].message


@pytest.mark.parametrize(
    ("entry", "record", "status", "code"),
    [
        (ROW, run(), "gone", 0),
        (ROW, run(schedules=2), "undecided", 4),  # the cell is below its floor, which the evidence says
        (ROW, run(replace(FOREIGN, code="KV104")), "undecided", 1),
        (replace(ROW, cell="retract-resume/llama"), run(), "unused", 1),
        (replace(ROW, engine="vllm"), run(), "elsewhere", 0),
        (replace(ROW, cell="a/b"), replace(run(), argv=("probe", "sglang", "--changed", "a.py")), "elsewhere", 0),
        (replace(EXPECTED, cell="a/b"), replace(run(), argv=("probe", "sglang", "--changed=a.py")), "elsewhere", 0),
        (ROW, replace(run(FOREIGN), argv=("probe", "sglang", "--changed", "a.py")), "known", 0),
        (replace(ROW, cell="retract-*", place="content: *", engine="builtin"), run(FOREIGN), "known", 0),
        (EXPECTED, run(), "unused", 1),
        (EXPECTED, replace(run(), environment={"engine": {"absent": {EXPECTED.cell: "no tree"}}}), "gone", 0),
        (EXPECTED, replace(run(), environment={"engine": {"absent": {"other/cell": "no tree"}}}), "unused", 1),
        (replace(EXPECTED, cell=CELL), run(), "gone", 0),
        (replace(EXPECTED, says="no time"), run(unknown=True), "undecided", 4),
    ],
)
def test_what_becomes_of_a_row(entry: BaselineEntry, record: RunRecord, status: str, code: int) -> None:
    result = judged(entry, record=record)
    assert (statuses(result), result.exit_code) == ([status], code)


def test_an_expired_row_covers_nothing_and_says_whose_it_is() -> None:
    late = DAY + datetime.timedelta(days=1)
    result = judged(ROW, record=run(FOREIGN), day=late)
    assert (result.exit_code, statuses(result), len(result.integrity)) == (1, ["expired"], 1)
    assert "expired on 2027-03-01; kv team" in "\n".join(result_lines(result))
    assert judged(ROW, record=run(), day=late).exit_code == 1, "also where nothing is found"


def test_a_cell_that_ended_at_a_known_finding_says_what_it_did_not_run() -> None:
    told = "\n".join(result_lines(judged(ROW, record=run(FOREIGN, schedules=1))))
    assert f"{CELL} ended after 1 of 400 schedules: later schedules were not judged" in told


HAND_EDITED = """# ours
[[finding]]  # one
cell = 'a/b'
code = "KV102"
place = "content: device k"
owner = "me"
reason = '''
two
lines'''
expires = 2027-03-01

# about the second
# in two lines
[[unknown]]
cell = "c/d"
says = "no such"
owner = "me"
reason = "x"
expires = 2027-03-01
# at the end
"""


def test_rows_come_and_go_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_bytes(HAND_EDITED.encode())
    add_rows(file, [ROW])
    assert file.read_text() == HAND_EDITED + "\n" + block(ROW)
    assert [entry.number for entry in read_baseline(file)] == [1, 2, 3]
    remove_rows(file, {2})
    assert file.read_text().startswith(HAND_EDITED[: HAND_EDITED.index("# about")])
    assert "# in two lines" not in file.read_text() and file.read_text().endswith(block(ROW))
    remove_rows(file, {1, 2})
    assert file.read_text() == ""


def test_lines_of_another_system_stay(tmp_path: Path) -> None:
    file = tmp_path / "known.toml"
    file.write_bytes(HAND_EDITED.replace("\n", "\r\n").encode())
    remove_rows(file, {2})
    assert file.read_bytes() == HAND_EDITED[: HAND_EDITED.index("# about")].replace("\n", "\r\n").encode()


@pytest.mark.parametrize(
    "text",
    [
        'finding = [{cell="a/b",code="KV102",place="p",owner="o",reason="r",expires=2027-03-01}]\n',
        HAND_EDITED.replace("two\n", "[[unknown]]\n"),
    ],
)
def test_a_file_that_cannot_be_edited_safely_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "known.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=r"edit it by hand|without a person"):
        remove_rows(file, {1})
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[finding]]", "[finding]", "double brackets"),
        ("[[unknown]]", "[[unknwon]]", "unknown key 'unknwon'"),
        ("says =", "say =", r"row 2 \(unknown 1\): unknown key 'say'.*did you mean 'says'"),
        ("says =", "place = 'x'\nsays =", r"row 2 .*unknown key 'place'"),
        ('owner = "me"', "", r"row 1 .*the key 'owner' is missing"),
        ('owner = "me"', 'owner = " "', r"row 1 .*owner: expected a text"),
        ("KV102", "KV10", r"row 1 .*expected a finding code, got 'KV10'"),
        ("2027-03-01", '"2027-03-01"', r"row 1 .*expires: expected a date"),
        ("2027-03-01", "2027-03-01T00:00:00", r"row 1 .*expires: expected a date"),
        ("2027-03-01", "2027-02-30", "known.toml: .*expected TOML"),
    ],
)
def test_a_wrong_file_is_one_line_with_the_number_of_the_row(old: str, new: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        parse_baseline(HAND_EDITED.replace(old, new, 1), Path("known.toml"))
    assert "\n" not in str(raised.value)


def test_the_same_row_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="row 2: the same as row 1"):
        parse_baseline(block(ROW) + block(replace(ROW, owner="you")), Path("known.toml"))


def test_rows_of_a_run_cover_that_run(tmp_path: Path) -> None:
    symptom = replace(FOREIGN, code="KV501", oracle="output", cause=f"{PASSED.run_id}.1")
    hostile = replace(FOREIGN, buffer='k"\\\x1b[31m\x7fé', page=3)
    other = replace(FOREIGN, code="KV104")
    record = run(FOREIGN, symptom, replace(FOREIGN, page=9), hostile, other, unknown=True)
    rows = rows_of(record, owner="me", reason="r", expires=DAY)
    assert [(row.code, len(row.places)) for row in rows] == [("KV102", 2), ("KV104", 1), (None, 0)]
    add_rows(tmp_path / "known.toml", rows)
    result = judged(*read_baseline(tmp_path / "known.toml"), record=record)
    assert (result.exit_code, set(statuses(result))) == (0, {"known"})


def test_a_row_of_several_places_covers_these_and_names_those_not_seen() -> None:
    row = replace(ROW, place=(str(ROW.place), "content: device latent"))
    assert parse_baseline(block(row), Path("known.toml")) == (row,)
    result = judged(row, record=run(FOREIGN))
    assert result.exit_code == 0 and "not seen: content: device latent" in "\n".join(result_lines(result))
    assert judged(row, record=run(FOREIGN, replace(FOREIGN, buffer="other"))).exit_code == 1
    for bad in ("[]", '["a", 1]', '[""]'):
        with pytest.raises(UsageError, match=r"row 1 .*place"):
            parse_baseline(block(ROW).replace(f'"{ROW.place}"', bad), Path("known.toml"))


def test_the_reason_of_an_unknown_is_kept_without_numbers_and_what_was_tried() -> None:
    row = ScenarioResult(
        id="a/b", shape="b", verdict=Verdict.UNKNOWN, code="KV990", reason="no x in 1,200 of 3.5 s (tried m:x: gone)"
    )
    (kept,) = rows_of(replace(PASSED, scenarios=(row,)), owner="o", reason="r", expires=DAY)
    assert kept.says == "no x in * of * s"
