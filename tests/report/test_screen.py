"""The screen: it fits its width at 80 to 160 columns, has an entry for each cause, and says how much was not done."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest
from rigs.literal_record import FAILED, FOREIGN, PASSED

from kvcheck.core.base.record import Coverage, Evidence, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.cards import cards_of
from kvcheck.core.report.ci import to_github
from kvcheck.core.report.ci.outcome import of_record
from kvcheck.core.report.screen import MARK, grid_lines, screen_lines, short_count
from kvcheck.core.report.to_html import render
from kvcheck.core.run.cell import STOPPED

WIDTHS = (80, 100, 120, 160)
FAMILIES = ("glm-5.1", "deepseek-v3.2", "deepseek-v3", "llama-3", "llama-3-fp8", "gpt-oss", "qwen3-next")
SCENARIOS = ("retract-resume", "hicache", "pd-transfer", "nvlink-aux")
PROBES = tuple(f"{pool}-{how}" for pool in ("mha", "mla", "nsa", "swa") for how in ("kernel", "late", "direct"))


def cell(scenario: str, shape: str, verdict: Verdict = Verdict.PASS, schedules: int = 7) -> ScenarioResult:
    return ScenarioResult(
        id=f"{scenario}/{shape}",
        shape=shape,
        verdict=verdict,
        reason=None if verdict is Verdict.PASS else "no retraction in 7 schedules",
        schedules=schedules,
        evidence=Evidence(schedules=schedules, words_verified={"k": 64_900_000}, orderings_checked=1_234),
        coverage=Coverage(wanted=24, floor=3, tried=("eager",), not_tried=("delay:wire", "answers")),
    )


def run(*rows: ScenarioResult, findings: tuple[Finding, ...] = (), **changes: object) -> RunRecord:
    evidence = Evidence(schedules=0)
    for row in rows:
        evidence = evidence.plus(row.evidence)
    worst = Verdict.worst([row.verdict for row in rows])
    record = replace(PASSED, scenarios=rows, evidence=evidence, verdict=worst, findings=findings)
    return replace(record, **changes)  # type: ignore[arg-type]


OWN = run(
    *(cell(name, f"{of}-{size}") for name in SCENARIOS for size in ("micro", "tiny") for of in FAMILIES),
    cell("pd-transfer", "llama-3-tiny/mooncake"),
)
ENGINE = run(
    *(cell("hicache", f"host-copy.{each}") for each in PROBES),
    cell("retract-resume", "metadata.get-buf"),
    environment={"engine": {"engine": "sglang", "version": "0.5.23"}},
)
RED = replace(
    run(
        *(replace(row, verdict=Verdict.FAIL, reason=None) for row in OWN.scenarios[:3]),
        *(replace(row, verdict=Verdict.UNKNOWN, reason="no retraction in 7 schedules") for row in OWN.scenarios[3:9]),
    ),
    findings=tuple(replace(each, message=f"{each.message} " * 20) for each in FAILED.findings),
)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("record", [OWN, ENGINE, RED], ids=["own", "engine", "red"])
def test_no_line_but_a_command_is_longer_than_the_screen(record: RunRecord, width: int) -> None:
    lines = screen_lines(record, width, {}, untried=("not tried: ranks as processes " * 9,))
    assert not [line for line in lines if len(line) > width and "kvcheck " not in line]
    assert len(lines) <= 25 or record is RED
    marks = [
        mark for line in grid_lines(record, width) for mark in line if mark in MARK.values() and "pass" not in line
    ]
    assert len(marks) == len(record.scenarios)


def test_of_notes_that_differ_in_numbers_alone_the_last_is_shown() -> None:
    lines = screen_lines(OWN, 120, {}, untried=("1,024 bytes verified", "7 bytes verified", "no clock"))
    assert [line.split()[-1] for line in lines if "verified" in line or "clock" in line] == ["verified", "clock"]


def test_marks_stand_below_the_family_with_a_count_where_there_is_room() -> None:
    wide, narrow = grid_lines(OWN, 120), grid_lines(OWN, 80)
    assert wide[0].split() == [*FAMILIES] and wide[1].split()[:3] == ["retract-resume", "✔7", "✔7"]
    assert "✔7" not in "".join(narrow) and narrow[-3].split() == [SCENARIOS[-1], *["✔"] * 14]
    assert [line.partition("✔")[2][:8] for line in grid_lines(OWN, 60)[:2]] == ["✔ glm-5.", "✔ deepse"]
    assert "micro, then tiny" in wide[-1] and "micro, then tiny" in narrow[-1]
    for line in wide[1:-2]:
        assert [at.start() for at in re.finditer("✔", line)][::2] == [at.start() for at in re.finditer(r"\S+", wide[0])]


def test_a_probe_has_its_subjects_in_its_row() -> None:
    lines = grid_lines(ENGINE, 100)
    assert lines[0].startswith(" hicache · host-copy ") and lines[-1].split() == [
        "retract-resume",
        "·",
        "metadata",
        "✔get-buf",
    ]
    assert [each for line in lines for each in re.findall(r"✔(\S+)", line)] == [*PROBES, "get-buf"]


def test_an_unfinished_cell_is_open() -> None:
    begun, not_begun = (replace(cell("hicache", "a", Verdict.UNKNOWN, n), reason=STOPPED) for n in (2, 0))
    assert grid_lines(run(begun), 80)[1].split() == ["hicache", "·2"]
    assert grid_lines(run(not_begun), 80)[1].split() == ["hicache", "·"]


def test_the_lines_below_count_what_was_compared_and_not_tried_and_go_on() -> None:
    text = "\n".join(screen_lines(OWN, 120, {}))
    assert " compared     3.7 G words and 70.3 k orderings in 399 schedules\n" in text
    assert "969 of 1,368 planned schedules; some answers in 57 cells, delays in 57 cells\n" in text
    assert re.search(r"go on: kvcheck stress .*--max-time \d+\n", text)
    assert text.splitlines()[-1].startswith(" PASS  57 cells passed; 399 schedules")
    assert "go on" not in "\n".join(screen_lines(replace(OWN, complete=False), 120, {}))


def test_equal_reasons_of_unknown_cells_are_one_line() -> None:
    (told,) = [line for line in screen_lines(RED, 10_000, {}) if line.startswith(" ? ")]
    assert "6 cells: no retraction in 7 schedules" in told and told.endswith(" and 2 more)")


def found(number: int, code: str, shape: str, **changes: object) -> Finding:
    line = f"hicache:shape={shape},target=sglang%3A/env,seed=1,schedule=0"
    one = replace(FOREIGN, id=f"{PASSED.run_id}.{number}", code=code, scenario="hicache", shape=shape, schedule=line)
    return replace(one, **changes)  # type: ignore[arg-type]


def test_one_code_in_many_cells_is_one_entry_and_other_codes_of_these_cells_are_beside_it() -> None:
    rows = [found(at, "KV301", f"host-copy.{each}", oracle="contract") for at, each in enumerate(PROBES[:3])]
    rows += [found(9, "KV102", "host-copy.mha-late"), found(10, "KV102", "host-copy.mha-late", layer=2)]
    rows += [found(11, "KV401", "index-moves.tree", oracle="accounting")]
    first, other = cards_of(rows)
    assert (first.finding.code, first.cells, len(first.others) + 1) == ("KV301", tuple(r.cell for r in rows[:3]), 5)
    assert [bug.cause.code for bug in first.beside] == ["KV102"] and other.finding.code == "KV401"
    lines = screen_lines(replace(ENGINE, findings=tuple(rows), verdict=Verdict.FAIL), 160, {})
    (head,) = [line for line in lines if "KV301" in line and "✘" in line]
    assert "3 cells: hicache/host-copy.mha-kernel" in head and head.endswith("5 findings")
    assert "    beside    KV102 x2" in lines


def test_functions_of_an_engine_are_on_the_screen_in_the_page_and_in_markdown() -> None:
    call = {"called": "Controller.write > move_indices   engine/controller.py:532"}
    record = replace(ENGINE, findings=(found(1, "KV301", PROBES[0], minimal=call),), verdict=Verdict.FAIL, exit_code=1)
    assert f"    called    {call['called']}" in screen_lines(record, 100, {})
    page = render(record)
    assert "<dt>called</dt>" in page and "smallest failing case" not in page
    assert f"called {call['called']}" in unescape(to_github.summary(of_record(record)))


def test_a_condition_is_one_line_and_no_symptom_of_a_failure() -> None:
    rows = (
        found(1, "KV301", "a.b", oracle="contract"),
        found(2, "KV301", "a.b", oracle="contract", condition="unequal"),
    )
    assert len(cards_of(rows)) == 2
    (told,) = [line for line in screen_lines(replace(ENGINE, findings=rows), 160, {}) if line.startswith(" ~ ")]
    assert told == " ~ KV301 hicache/a.b: 1 conditional finding, only if unequal"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (9_999, "9,999"), (64_912, "64.9 k"), (1_980_000, "1.98 M"), (3.1e9, "3.1 G")]
)
def test_large_counts_are_short(number: float, text: str) -> None:
    assert short_count(int(number)) == text
