"""Files for CI systems: each kind of record in each format, read as its system reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from report.test_gate_result import BUDGET, FAST, SLOW, UNSURE, gate
from rigs import ci_readers
from rigs.gate import bench_row, bench_run
from rigs.literal_record import FAILED, FOREIGN, MUTANTS, PASSED, SCENARIOS, UNJUDGED
from rigs.live_record import LIVE

from kvcheck.core.base.record import Evidence, Finding, RunRecord, Verdict
from kvcheck.core.report import GATE_WRITERS, WRITERS
from kvcheck.core.report.ci import to_ctrf, to_github, to_gitlab, to_junit, to_sarif
from kvcheck.core.report.ci.outcome import of_record
from kvcheck.core.report.ci.trouble import TroubleKind
from kvcheck.core.report.gate.pages import markdown as gate_markdown
from kvcheck.core.report.markdown import code_block, code_span, escaped

FORMATS = ("ctrf", "junit", "github", "gitlab", "sarif")
BAD = "<b>&amp; \"q\" 'a' ]]> 50% %0A::error title=x::y\r\n::error::z\t\x00\x1b[31m\ud800\ufffe 🙈 ##[error]w"
CELL = "retract-resume/glm-5.1-tiny"


def finding(number: int, **changed: object) -> Finding:
    """A finding with an id of the failed run."""
    return replace(FOREIGN, **{"id": f"{FAILED.run_id}.{number}", **changed})  # type: ignore[arg-type]


CONDITION = finding(1, condition="states are sent late", shape="<b>tiny</b>", scenario="handover")
SYMPTOMS = tuple(finding(at, code="KV501", oracle="output", cause=f"{FAILED.run_id}.1") for at in range(2, 22))
FAILS = (replace(PASSED.scenarios[0], verdict=Verdict.FAIL),)
NOT_BEGUN = replace(MUTANTS[0], verdict=Verdict.UNKNOWN, outcome="not-begun")
ENDED_1: dict[str, Any] = {"verdict": Verdict.FAIL, "exit_code": 1}
ENDED_4: dict[str, Any] = {"verdict": Verdict.UNKNOWN, "exit_code": 4}
RECORDS: dict[str, tuple[RunRecord, Verdict]] = {
    "passed": (PASSED, Verdict.PASS),
    "failed": (FAILED, Verdict.FAIL),
    "unjudged": (UNJUDGED, Verdict.UNKNOWN),
    "interrupted": (replace(PASSED, complete=False, exit_code=130), Verdict.UNKNOWN),
    "not saved": (replace(PASSED, exit_code=2), Verdict.UNKNOWN),
    "failed for no cell": (replace(PASSED, **ENDED_1), Verdict.FAIL),
    "conditional": (replace(PASSED, findings=(CONDITION,)), Verdict.PASS),
    "conditional fails": (replace(PASSED, findings=(CONDITION,), scenarios=FAILS, **ENDED_1), Verdict.FAIL),
    "bench": (bench_run(bench_row()), Verdict.PASS),
    "server": (LIVE, Verdict.FAIL),
    "symptoms": (replace(FAILED, findings=(finding(1), *SYMPTOMS), mutants=()), Verdict.FAIL),
    "mutants": (replace(PASSED, scenarios=(), mutants=MUTANTS, **ENDED_1), Verdict.FAIL),
    "mutant not run": (replace(PASSED, scenarios=(), mutants=(NOT_BEGUN,), **ENDED_4), Verdict.UNKNOWN),
    "empty": (replace(PASSED, scenarios=(), evidence=Evidence(), **ENDED_4), Verdict.UNKNOWN),
    "hostile": (
        replace(
            FAILED,
            argv=("stress", BAD),
            repro=BAD,
            warnings=(BAD,),
            started_at=BAD,
            findings=(finding(1, code=BAD, message=BAD, buffer=BAD, shape=BAD, replay=BAD, condition=None),),
            scenarios=(replace(SCENARIOS[2], id=f"retract-resume/{BAD}", shape=BAD, reason=BAD),),
            mutants=(replace(MUTANTS[1], name=BAD, message=BAD, replay=BAD),),
        ),
        Verdict.FAIL,
    ),
}
WRITTEN = {
    "ctrf": to_ctrf.render,
    "junit": to_junit.render,
    "github": to_github._lines,
    "gitlab": to_gitlab.render,
    "sarif": to_sarif.render,
}


def is_red(format_name: str, text: str) -> bool:
    """What the CI system makes of the file."""
    if format_name == "ctrf":
        return any(test["status"] not in ("passed", "skipped") for test in ci_readers.ctrf(text))
    if format_name == "junit":
        suite = ci_readers.junit(text)
        return suite.get("failures") != "0" or suite.get("errors") != "0"
    if format_name == "github":
        return any(level == "error" for level, _, _ in ci_readers.github(text))
    if format_name == "gitlab":
        return any(entry["severity"] != "minor" for entry in ci_readers.gitlab(text))
    return any(result["kind"] != "review" for result in ci_readers.sarif(text)["results"])


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", RECORDS)
def test_every_record_is_read_and_only_a_pass_is_green(name: str, format_name: str, tmp_path: Path) -> None:
    record, verdict = RECORDS[name]
    texts = []
    for at in range(2):
        WRITERS.load(format_name)(record, tmp_path / f"{at}")
        texts.append((tmp_path / f"{at}").read_text(encoding="utf-8"))
    assert texts[0] == texts[1], "the same record gives the same file"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"], "no draft is left"
    assert is_red(format_name, texts[0]) == (verdict is not Verdict.PASS)
    outcome = of_record(record)
    assert Verdict.worst(case.verdict for case in outcome.cases) is verdict
    assert (outcome.exit_code == 0) == (verdict is Verdict.PASS)


def test_junit_tells_findings_from_what_is_unknown() -> None:
    suite = ci_readers.junit(to_junit.render(of_record(FAILED)))
    cases = {case.get("name"): case for case in suite.findall("testcase")}
    text = str(cases[CELL].findtext("failure"))
    assert FOREIGN.message in text and f"next: {FOREIGN.replay}" in text and "KV901" in text, "each cause of the cell"
    error = cases["retract-resume/gpt-oss-tiny"].find("error")
    assert error is not None and "no retraction in 200 schedules" in str(error.get("message"))
    assert [child.tag for child in cases["handover/<b>tiny</b>"]] == ["system-out"]
    failed = {name: case.find("failure") is not None for name, case in cases.items()}
    assert (failed["mutant/index-buffer-not-saved"], failed["mutant/metadata-read-returns-view"]) == (False, True)
    facts = {each.get("name"): each.get("value") for each in suite.iter("property")}
    assert (facts["run"], facts["exit_code"], facts["words_verified.latent"]) == (FAILED.run_id, "1", "1204224")


@pytest.mark.parametrize("format_name", FORMATS)
def test_twenty_symptoms_are_one_entry(format_name: str) -> None:
    record = RECORDS["symptoms"][0]
    outcome = of_record(replace(record, scenarios=record.scenarios[:2]))
    assert [(each.code, each.seen) for each in outcome.troubles] == [("KV102", "21 findings; beside KV501 x20")]
    text = WRITTEN[format_name](outcome)
    named = {
        "ctrf": lambda: [each["message"] for each in ci_readers.ctrf(text) if each["status"] == "failed"],
        "junit": lambda: [each.get("type") for each in ci_readers.junit(text).iter("failure")],
        "github": lambda: [title for level, title, _ in ci_readers.github(text) if level == "error"],
        "gitlab": lambda: [each["check_name"] for each in ci_readers.gitlab(text)],
        "sarif": lambda: [each["ruleId"] for each in ci_readers.sarif(text)["results"]],
    }[format_name]()
    assert [name.partition(" ")[0] for name in named] == ["KV102"]
    assert "beside KV501 x20" in text


def test_github_says_how_many_it_left_out_and_the_worst_come_first() -> None:
    many = tuple(finding(at, oracle=f"oracle-{at}", shape=f"shape-{at}", request=at) for at in range(1, 15))
    late = replace(many[0], id=f"{FAILED.run_id}.99", condition="late")
    record = replace(FAILED, findings=(late, *many))
    errors = [each for each in ci_readers.github(to_github._lines(of_record(record))) if each[0] == "error"]
    causes = sum(each.kind is not TroubleKind.CONDITIONAL for each in of_record(record).troubles)
    assert len(errors) == 10 and errors[-1][2].startswith(f"{causes - 9} more errors")
    assert [title for _, title, _ in errors[:9]] == ["KV102 foreign bytes"] * 9
    found = ci_readers.github(to_github._lines(of_record(record)))
    assert [title for level, title, _ in found if level == "warning"][:1] == ["conditional KV102 foreign bytes"]


def test_notes_are_no_annotations_of_github_and_warnings_are() -> None:
    notes = ("not exercised: x", "changed: 1 of 1 lines", f"{PASSED.scenarios[0].id}: driven: y", "the disk is full")
    found = ci_readers.github(to_github._lines(of_record(replace(PASSED, warnings=notes))))
    assert [text for level, _, text in found if level == "warning"] == ["the disk is full"]


def test_people_read_a_card_once_and_machines_each_place_of_it() -> None:
    places = tuple(finding(at, buffer=f"buffer-{at}", page=at, request=at, seen_request=None) for at in range(1, 15))
    outcome = of_record(replace(FAILED, findings=places, scenarios=SCENARIOS[:1], mutants=()))
    assert [each.seen for each in outcome.listed] == ["14 findings"] and len(outcome.troubles) == 14
    aliased = finding(20, code="KV305", oracle="aliasing", shape="another", buffer="metadata", request=70)
    mixed = of_record(replace(FAILED, findings=(*places, aliased)))
    assert [each.code for each in mixed.listed][:2] == ["KV305", "KV102"], "the clearest first, as in the terminal"
    assert to_github.summary(outcome).count("#### ") == 1 and len(ci_readers.gitlab(to_gitlab.render(outcome))) == 14


def test_github_commands_hold_hostile_text_as_data() -> None:
    lines = to_github._lines(of_record(RECORDS["hostile"][0])).splitlines()
    assert all(line.startswith(("::error title=", "::warning title=", "::notice title=")) for line in lines)
    found = ci_readers.github("\n".join(lines))
    assert any("50% %0A::error title=x::y" in text for _, _, text in found), "decoded, it is the record's text"
    assert all(char.isprintable() or char == "\n" for _, title, text in found for char in title + text)


def test_fingerprints_stay_from_run_to_run_and_tell_places_apart() -> None:
    def prints(*findings: Finding, run_id: str = FAILED.run_id) -> list[str]:
        record = replace(FAILED, run_id=run_id, findings=findings, scenarios=SCENARIOS[:1], mutants=())
        return [entry["fingerprint"] for entry in ci_readers.gitlab(to_gitlab.render(of_record(record)))]

    first = prints(finding(1))
    later = finding(7, page=3, row=9, layer=1, request=4, seen_request=2, message="other words", schedule="x:y=2")
    assert prints(replace(later, id="20270101-000000-aaaa.7"), run_id="20270101-000000-aaaa") == first
    assert prints(finding(1, minimal={"called": "Pool.load   engine/pool.py:7"})) == first
    others = [finding(1, buffer="latent"), finding(1, code="KV104"), finding(1, tier="host")]
    assert len({first[0], *(prints(each)[0] for each in others)}) == 4
    apart = {"earlier": {"operation": "hicache.load"}, "later": {"operation": "decode.read"}}
    race = finding(1, code="KV201", oracle="ordering", minimal=apart)
    assert prints(race) != prints(replace(race, minimal={**apart, "earlier": {"operation": "hicache.save"}}))


def test_one_cause_in_two_cells_is_an_entry_of_each() -> None:
    elsewhere = finding(2, shape="gpt-oss-tiny", schedule="x:y=2")
    record = replace(FAILED, findings=(finding(1), elsewhere), mutants=())
    paths = [each["location"]["path"] for each in ci_readers.gitlab(to_gitlab.render(of_record(record)))][:2]
    assert paths == [CELL, "retract-resume/gpt-oss-tiny"]
    turned = replace(record, findings=(replace(elsewhere, id=f"{FAILED.run_id}.1"), finding(2)))
    both = [ci_readers.gitlab(to_gitlab.render(of_record(each))) for each in (record, turned)]
    names = [{each["fingerprint"] for each in entries} for entries in both]
    assert names[0] == names[1], "whichever cell came first"


@pytest.mark.parametrize(
    ("cell", "path"), [("a/b c", "a/b_c"), ("../x", "x"), ("/", "run"), ("../..", "run"), ("ä/🙈", "_/_")]
)
def test_a_path_leads_out_of_nothing(cell: str, path: str) -> None:
    assert to_gitlab.path_of(cell) == path


def test_sarif_has_rules_with_help_and_says_open_for_unknown() -> None:
    run = ci_readers.sarif(to_sarif.render(of_record(FAILED)))
    rules = {rule["id"]: rule for rule in run["tool"]["driver"]["rules"]}
    assert rules["KV102"]["help"]["text"]
    kinds = {result["ruleId"]: (result["kind"], result["level"]) for result in run["results"]}
    assert kinds["KV102"] == ("fail", "error") and kinds["KV990"] == ("open", "none")
    assert "physicalLocation" not in json.dumps(run), "no finding lies in a file"


GATES = {
    "pass": (gate(PASSED), 0),
    "fail": (gate(FAILED, PASSED), 1),
    "no evidence": (gate(UNJUDGED), 4),
    "slower": (gate(bench_run(SLOW), PASSED, budgets=(BUDGET,), again=SLOW), 3),
    "ok": (gate(bench_run(FAST), PASSED, budgets=(BUDGET,), again=FAST), 0),
    "inconclusive": (gate(bench_run(UNSURE), PASSED, budgets=(BUDGET,), again=UNSURE), 4),
    "let pass": (gate(bench_run(UNSURE), PASSED, budgets=(BUDGET,), again=UNSURE, on_inconclusive="warn"), 0),
    "not measured": (gate(PASSED, budgets=(BUDGET,)), 4),
    "conditional": (gate(RECORDS["conditional"][0]), 0),
    "conditional fails": (gate(RECORDS["conditional"][0], fail_on_conditional=True), 1),
    "interrupted": (gate(PASSED, complete=False), 130),
}


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("name", GATES)
def test_the_gate_is_red_in_each_format_where_it_does_not_exit_0(name: str, format_name: str, tmp_path: Path) -> None:
    result, code = GATES[name]
    assert result.exit_code == code
    GATE_WRITERS.load(format_name)(result, tmp_path / "file")
    text = (tmp_path / "file").read_text(encoding="utf-8")
    assert is_red(format_name, text) == (code != 0)


def test_markdown_of_a_failing_gate_has_an_entry_for_each_cause_with_its_line_in_a_code_block() -> None:
    record = replace(RECORDS["symptoms"][0], identity=FAILED.identity, scenarios=SCENARIOS[:1])
    text = gate_markdown(gate(record))
    (entry,) = [line for line in text.splitlines() if line.startswith("#### ")]
    assert entry == f"#### 1. KV102 foreign bytes: `{CELL}`"
    assert f"```\n{FOREIGN.replay}\n```" in text and "beside KV501 x20" in text
    assert text.count("KV501") == 1, "symptoms are counted, not listed"


def test_code_in_markdown_is_not_escaped_and_cannot_end_early() -> None:
    assert code_span("index_k_with_scale <b>") == "`index_k_with_scale <b>`"
    assert code_span("a ` b") == "``a ` b``" and code_span("`a``") == "``` `a`` ```" and code_span("") == "`   `"
    assert code_block(["a ```` b\n# c"]) == ["`````", "a ```` b\\n# c", "`````"]
    assert escaped("a_b __c__ _d e_ f__g") == "a_b &#95;&#95;c&#95;&#95; &#95;d e&#95; f__g"


def test_a_step_summary_has_causes_lines_and_a_table_and_stays_small() -> None:
    text = to_github.summary(of_record(FAILED))
    assert text.startswith("### kvcheck: FAIL, exit 1\n") and f"```\n{FOREIGN.replay}\n```" in text
    assert "UNKNOWN | retract-resume/gpt-oss-tiny |" in text
    long = replace(FAILED.findings[0], message="<" * 5000)
    many = tuple(replace(long, id=f"{FAILED.run_id}.{at}", buffer=f"b{at}", cause=None) for at in range(300))
    short = to_github.summary(of_record(replace(FAILED, findings=many)))
    assert len(short.encode()) <= to_github.MOST_BYTES
    hostile = to_github.summary(of_record(RECORDS["hostile"][0]))
    assert "<b>" not in hostile.replace("`", "\0").split("\0")[0]


NO_CASES = " name='a' tests='0' failures='0' errors='0'"


@pytest.mark.parametrize(
    ("reader", "text"),
    [
        ("junit", f"<testsuites><testsuite{NO_CASES}><properties/></testsuite></testsuites>"),
        ("junit", "<testsuite/>"),
        ("junit", "<testsuites>\x00</testsuites>"),
        ("github", "::error title=a:b::c"),
        ("github", "::error title=a::50%"),
        ("github", "::error title=a::b\n" * 11),
        ("gitlab", "{}"),
        ("gitlab", json.dumps([{"description": "a"}])),
        ("sarif", json.dumps({"$schema": "", "version": "2.0.0", "runs": []})),
    ],
)
def test_the_readers_refuse_what_their_systems_refuse(reader: str, text: str) -> None:
    with pytest.raises((AssertionError, KeyError, ElementTree.ParseError)):
        getattr(ci_readers, reader)(text)
