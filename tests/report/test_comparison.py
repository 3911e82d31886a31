"""Several runs on one page: what each cell says, what is not run stays unjudged, hostile text stays text."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from report.test_report import Page
from rigs.gate import bench_row
from rigs.literal_record import FAILED, MARKUP, PASSED
from typer.testing import CliRunner

from kvcheck.commands.report import report
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence, Finding, Interval, RunRecord, ScenarioResult, Verdict
from kvcheck.core.report.comparison.compare import Comparison, compare, counts
from kvcheck.core.report.comparison.pages import csv_table as to_csv
from kvcheck.core.report.comparison.pages import markdown as to_md
from kvcheck.core.report.comparison.pages import render as to_html
from kvcheck.core.run.store import RunStore

APP = typer.Typer()
APP.command()(report)
RETRACT, INDEX, LENGTHS = "retract-resume/retract.nsa", "hicache/layer-wait.nsa", "pd-transfer/state-lengths.nsa-longer"
LINE = "retract-resume:shape=retract.nsa,target=sglang%3Aenvs/old,seed=1,schedule=0"
FOUND = Finding(
    code="KV102",
    oracle="content",
    scenario="retract-resume",
    shape="retract.nsa",
    message="page 1 holds request 3",
    replay=f"kvcheck replay {LINE},expect=KV102",
)
PRICE = bench_row(2.0, case="seal", arm="move-sealed", baseline="move")
COUNTED = Evidence(schedules=6, events=60, requests=18, words_verified={"kv": 400, "index": 100}, orderings_checked=24)


def release(version: str, verdicts: dict[str, Verdict], **more: object) -> RunRecord:
    """A run of an installed engine."""
    rows = tuple(
        ScenarioResult(
            id=name,
            shape=name.partition("/")[2],
            verdict=verdict,
            reason="cannot drive: no pool" if verdict is Verdict.UNKNOWN else None,
            code="KV990" if verdict is Verdict.UNKNOWN else None,
            schedules=6,
            evidence=COUNTED,
        )
        for name, verdict in verdicts.items()
    )
    made = replace(
        PASSED,
        run_id=f"run-{version}",
        verdict=Verdict.worst(verdicts.values()),
        environment={"engine": {"engine": "sglang", "version": version, "python": "3.11.7", "torch": "2.13.0"}},
        scenarios=rows,
        findings=(FOUND,) if verdicts.get(RETRACT) is Verdict.FAIL else (),
        plan={"cells": [LINE.replace("old", version)], "shows": {RETRACT: "what a request gets back"}},
    )
    return replace(made, **more)  # type: ignore[arg-type]


OLD = release("0.5.9", {RETRACT: Verdict.FAIL, INDEX: Verdict.PASS, LENGTHS: Verdict.UNKNOWN})
NEW = release("0.5.14", {RETRACT: Verdict.PASS, LENGTHS: Verdict.PASS})


def verdicts(comparison: Comparison) -> dict[str, tuple[str, ...]]:
    return {
        group.title[0]: tuple(verdict.value for verdict in group.verdicts)
        for table in comparison.tables
        for group in table.groups
    }


def test_worst_row_is_the_bugs_verdict_and_what_was_not_run_is_unknown() -> None:
    found = compare([OLD, NEW])
    assert verdicts(found) == {"a": ("fail", "pass"), "b": ("pass", "unknown"), "c": ("unknown", "pass")}
    assert found.verdict is Verdict.FAIL
    (table,) = found.tables
    assert [column.label for column in table.columns] == ["sglang 0.5.9", "sglang 0.5.14"]
    missing = table.groups[1].rows[0].cells[1]
    assert (missing.verdict, missing.name) == (None, "not run")


def test_what_a_release_has_dropped_is_neither_not_run_nor_unknown() -> None:
    engine = {"engine": "sglang", "version": "0.5.14", "absent": {INDEX: "no <tree>: dropped on purpose"}}
    found = compare([OLD, replace(NEW, environment={"engine": engine})])
    cell = found.tables[0].groups[1].rows[0].cells[1]
    assert (cell.verdict, cell.name) == (None, "not in this release")
    both = {**{RETRACT: Verdict.PASS}, "retract-resume/pool-copy.nsa": Verdict.PASS}
    dropped = replace(release("0.5.23", {RETRACT: Verdict.PASS}), environment={"engine": engine | {"absent": both}})
    assert verdicts(compare([release("0.5.22", both), dropped])) == {"a": ("pass", "pass")}
    for text in (to_md(found), to_csv(found), to_html(found)):
        assert "dropped on purpose" in text and "<tree>" not in to_html(found)


def of_version(run_id: str, **engine: object) -> RunRecord:
    made = release("0.6.0", {RETRACT: Verdict.PASS})
    return replace(made, run_id=run_id, environment={"engine": {"engine": "sglang", "version": "0.6.0", **engine}})


def test_states_of_one_version_are_told_apart_by_commit_files_or_run() -> None:
    runs = [
        *(of_version("a", commit="ab" * 20), of_version("b", commit=f"{'cd' * 20} and changes")),
        *(of_version("x", files="a" * 64), of_version("y", files="b" * 64), of_version("z", files="b" * 64)),
    ]
    assert [column.label.removeprefix("sglang 0.6.0") for column in compare(runs).columns] == [
        *(" at abababababab", " at cdcdcdcdcdcd and changes"),
        *(", files aaaaaaaaaaaa", ", files bbbbbbbbbbbb, run y", ", files bbbbbbbbbbbb, run z"),
    ]


def test_hole_in_passing_runs_is_no_pass() -> None:
    whole = release("1", {RETRACT: Verdict.PASS, INDEX: Verdict.PASS})
    assert compare([whole, replace(whole, run_id="again")]).verdict is Verdict.PASS
    assert compare([whole, release("2", {RETRACT: Verdict.PASS})]).verdict is Verdict.UNKNOWN


def test_cell_has_counts_codes_and_a_line_of_its_own() -> None:
    row = compare([OLD, NEW]).tables[0].groups[0].rows[0]
    failed, passed = row.cells
    assert (failed.codes, counts(failed)) == (("KV102",), "6 schedules, 500 words, 24 orderings")
    assert failed.replay == FOUND.replay and failed.text == FOUND.message
    assert passed.replay == f"kvcheck replay {LINE.replace('old', '0.5.14')}"
    assert compare([OLD]).tables[0].groups[2].rows[0].cells[0].replay == OLD.repro  # the plan has no line of it
    assert row.shows == "what a request gets back"


def test_bug_that_passes_says_that_its_rows_have_conditional_findings() -> None:
    latent = replace(FOUND, condition="peers differ")
    comparison = compare([replace(NEW, findings=(latent,)), OLD])
    retract, lengths = (group for group in comparison.tables[0].groups if group.title[0] in "ac")
    assert retract.verdicts[0] is Verdict.PASS
    assert (retract.conditional, lengths.conditional) == ((True, False), (False, False))
    for text in (to_html(comparison), to_md(comparison)):
        assert text.count("conditional findings") == 1 and "only if peers differ" in to_html(comparison)


def test_line_of_another_row_with_the_same_beginning_is_not_taken() -> None:
    longer = release("1", {RETRACT: Verdict.PASS}, plan={"cells": [LINE.replace("retract.nsa", "retract.nsa2")]})
    assert compare([longer]).tables[0].groups[0].rows[0].cells[0].replay == longer.repro


def test_notes_of_a_row_are_beside_it() -> None:
    warnings = (f"{INDEX}: not exercised: get_x; {INDEX}: 3 readers", "not exercised: nvlink-aux", "hicache/other: no")
    (retract, index, *_) = compare([replace(OLD, warnings=warnings)]).tables[0].groups
    assert index.rows[0].cells[0].notes == ("not exercised: get_x", "3 readers")
    assert retract.rows[0].cells[0].notes == ()


def test_engines_have_tables_of_their_own_and_equal_releases_are_told_apart() -> None:
    found = compare([OLD, replace(OLD, run_id="again"), PASSED])
    assert [table.engine for table in found.tables] == ["sglang", "builtin"]
    assert [column.label for column in found.columns] == [
        "sglang 0.5.9, run run-0.5.9",
        "sglang 0.5.9, run again",
        "builtin 0.1.0",
    ]


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(PASSED, run_id="x", scenarios=()), "run x judged no scenario"),
        (replace(NEW, scenarios=(*NEW.scenarios, NEW.scenarios[0])), f"has the row '{RETRACT}' twice"),
        (replace(OLD, repro="kvcheck"), "was given twice"),
    ],
)
def test_runs_that_hide_something_are_refused(other: RunRecord, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        compare([OLD, other])


def test_prices_stand_side_by_side_and_a_gap_is_no_number() -> None:
    runs = [
        replace(NEW, run_id=name, bench=() if ratio is None else (replace(PRICE, ratio=Interval(ratio, ratio, 2.6)),))
        for name, ratio in (("first", 2.5), ("second", None), ("third", 2.0))
    ]
    comparison = compare(runs)
    assert "not measured | 2 (2–2.6) |" in to_md(comparison)
    page = to_html(comparison)
    assert page.count('class="dot"') == 2 and page.count("not measured") == 1


def test_markdown_has_a_size() -> None:
    many = release("1", {f"hicache/layer-wait.{number}": Verdict.UNKNOWN for number in range(103)})
    lines = to_md(compare([many])).splitlines()
    assert sum(line.startswith("- sglang") for line in lines) == 100 and lines[-1] == "- and 3 more"


def test_page_is_whole_runs_nothing_and_keeps_hostile_text() -> None:
    hostile = release(MARKUP, {f"{MARKUP}/{MARKUP}": Verdict.UNKNOWN}, warnings=(f"not exercised {MARKUP}\x1b[31m",))
    text = to_html(compare([OLD, NEW, hostile, FAILED]))
    page = Page(text)
    assert page.open == [] and len(page.ids()) == len(set(page.ids()))
    assert "<script" not in text and "\x1b" not in text and "default-src" in text
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert text.count("kvcheck replay retract-resume:shape=retract.nsa") == 2


def test_table_has_a_line_a_cell_and_runs_no_formula() -> None:
    hostile = release("=cmd()", {RETRACT: Verdict.FAIL})
    rows = list(csv.DictReader(io.StringIO(to_csv(compare([OLD, NEW, hostile])))))
    cells = [row for row in rows if row["kind"] == "cell"]
    assert len(cells) == 3 * 3 and len(rows) == 2 * len(cells)
    first = cells[0]
    assert (first["version"], first["verdict"], first["codes"], first["words"]) == ("0.5.9", "fail", "KV102", "500")
    assert {row["version"] for row in rows} == {"0.5.9", "0.5.14", "'=cmd()"}
    assert [row["verdict"] for row in cells if row["cell"] == INDEX] == ["pass", "not run", "not run"]


def test_file_holds_all_runs_and_a_folder_one_page_each(tmp_path: Path) -> None:
    names = [str(RunStore(tmp_path / "runs").save(record)) for record in (OLD, NEW)]
    joint = [f"{name}={tmp_path / 'all'}.{name}" for name in ("html", "csv", "md")]
    options = [part for text in (*joint, f"html={tmp_path / 'pages'}") for part in ("-o", text)]
    again = str(tmp_path / "runs" / ".." / "runs" / OLD.run_id)  # the first run by another name: still the first run
    result = CliRunner().invoke(APP, [*names, again, *options])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "all.html").read_text(encoding="utf-8") == to_html(compare([OLD, NEW]))
    assert (tmp_path / "all.csv").read_text(encoding="utf-8") == to_csv(compare([OLD, NEW]))
    assert (tmp_path / "all.md").read_text(encoding="utf-8") == to_md(compare([OLD, NEW]))
    assert sorted(path.name for path in (tmp_path / "pages").iterdir()) == ["run-0.5.14.html", "run-0.5.9.html"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [(["-o", "md=."], "expected the name of a file, got a folder"), (["-o", "json=x.json"], "2 runs need a folder")],
)
def test_what_cannot_be_compared_is_refused_before_anything_is_written(
    options: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [str(RunStore(tmp_path / "runs").save(record)) for record in (OLD, NEW)]
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(APP, [*names, *options])
    assert isinstance(result.exception, UsageError) and complaint in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
