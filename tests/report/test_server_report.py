"""Runs against servers: page, tables, terminal lines, the gate and several servers side by side."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rigs.literal_record import CODE, MARKUP, PASSED
from rigs.live_record import HIERARCHY, LIVE, LIVE_PASSED
from rigs.schemas import check_fits

from kvcheck.core.base.record import Evidence, Identity, RunRecord, ScenarioResult, Verdict, to_plain
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.comparison.pages import csv_table as compared_csv
from kvcheck.core.report.comparison.pages import markdown as compared_md
from kvcheck.core.report.comparison.pages import render as compared_page
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.report.gate.result import evidence_problems, integrity_problems, summaries, tally
from kvcheck.core.report.screen import verdict_line
from kvcheck.core.report.to_html import render

(PASS_ROW, HIT_ROW) = LIVE_PASSED.scenarios


def served(**facts: object) -> dict[str, Any]:
    """The environment of LIVE with other facts about the server."""
    server = LIVE.environment["server"]
    assert isinstance(server, dict)
    return {"environment": {**LIVE.environment, "server": {**server, **facts}}}


def another(engine: str, **changed: Any) -> RunRecord:
    """LIVE_PASSED, served by another engine."""
    row = replace(PASS_ROW, id=f"hicache/{engine}", shape=engine)
    plan = {**LIVE_PASSED.plan, "cells": [str(LIVE_PASSED.plan["cells"][0]).replace("sglang", engine)]}  # type: ignore[index]
    made = replace(LIVE_PASSED, run_id=f"run-{engine}", plan=plan, scenarios=(row, HIT_ROW))
    return replace(made, **{**served(engine=engine, version="0.32.0"), **changed})


def table(page: str, name: str) -> str:
    """One section of a page."""
    return page[page.index(f'<section id="{name}">') :].partition("</section>")[0]


def problems(*records: RunRecord) -> list[str]:
    return [each.message for each in evidence_problems(records, code=CODE)]


def test_page_begins_with_what_never_happened() -> None:
    page = render(LIVE)
    order = [page.index(f'<section id="{name}">') for name in ("never", "scenarios", "server", "findings")]
    assert order == sorted(order)
    rows = table(page, "never")
    assert rows.count('<b class="badge unknown">') == 2
    assert "--require retract=10" in rows and "--max-total-tokens 1024" in rows
    assert "--enable-priority-scheduling" in rows and 'id="never"' not in render(LIVE_PASSED)


def test_requirement_of_a_kind_that_the_server_does_not_say_is_not_zero() -> None:
    row = ScenarioResult(id="require/transfer", shape="transfer", verdict=Verdict.UNKNOWN, reason="no counter")
    rows = table(render(replace(LIVE, scenarios=(row,), plan={"require": {"transfer": 5}})), "never")
    assert "--require transfer=5" in rows and "n/a: not reported" in rows


def test_table_has_a_column_a_kind_and_says_what_nobody_counts() -> None:
    rows = table(render(LIVE), "scenarios")
    heads = re.findall(r'<th class="n">([^<]+)', rows)
    assert heads == ["rounds", "requests", "tokens judged", "hit", "hit-token", "evict", "retract", "duration"]
    cells = {
        row.split("<td>")[2].partition("<")[0]: re.findall(r'data-label="[^"]*">([^<]*)', row)
        for row in rows.partition('<tr class="group">')[0].split("<tr>")[2:]
    }
    assert cells["prefix-cache"] == ["3 of 3", "120", "7,440", "96", "18,432", "4,096", "0", "20.5 s"]
    assert cells["hicache"] == ["1 of 3", "40", "640", "8", "n/a", "512", "n/a", "9.0 s"]


@pytest.mark.parametrize("facts", [{}, {"evidence": 5}, {"evidence": {"hit": None}}, {"engine": ["x"], "version": 5}])
def test_odd_facts_are_shown_as_they_are(facts: dict[str, object]) -> None:
    odd = replace(LIVE, environment={"server": facts}, plan={"require": "much"})
    assert 'id="server"' in render(odd) and compare([odd]).tables and verdict_line(odd)
    assert 'id="server"' not in render(replace(LIVE, environment={"server": "text"}))


def test_gate_takes_judged_tokens_as_evidence() -> None:
    assert contradictions(LIVE) == contradictions(LIVE_PASSED) == []
    assert problems(LIVE_PASSED) == [] and integrity_problems([LIVE_PASSED]) == ()
    assert tally([LIVE_PASSED, LIVE]).tokens_judged == 640 + 11_152
    (told,) = summaries([LIVE_PASSED])
    assert (told.server, told.cells, told.schedules) == ("sglang 0.5.23", 1, 1)
    check_fits(to_plain(LIVE))
    assert [each.message.partition(":")[0] for each in integrity_problems([LIVE])] == [
        "KV801 prefix-cache/sglang",
        "KV802 retract-resume/sglang",
    ]


@pytest.mark.parametrize("observed", [{}, {"token": 0}, {"token": 0, "hit": 50}, {"hit": 50}])
def test_pass_without_a_judged_token_is_none(observed: dict[str, int]) -> None:
    evidence = replace(HIERARCHY, observed=observed)
    blind = replace(LIVE_PASSED, evidence=evidence, scenarios=(replace(PASS_ROW, evidence=evidence),))
    assert "hicache/sglang passed without having judged anything" in problems(blind)


def test_requirements_are_no_cells_and_have_to_be_backed() -> None:
    only = replace(LIVE_PASSED, scenarios=(HIT_ROW,), evidence=Evidence())
    assert "the run judged no answer of its server" in problems(only)
    more = replace(LIVE_PASSED, plan={**LIVE_PASSED.plan, "require": {"hit": 9}})
    assert problems(more) == ["require/hit is pass, and the run observed 8 of 9 required"]
    gone = replace(LIVE_PASSED, scenarios=(PASS_ROW,))
    assert problems(gone) == ["cell require/hit is in the plan, and the record says nothing of it"]
    unasked = replace(LIVE_PASSED, plan={**LIVE_PASSED.plan, "require": {}})
    assert "cell require/hit is not in the plan of the run" in problems(unasked)
    assert any("require/retract is unknown: 0 of 10 retractions" in each for each in problems(LIVE))


def test_gate_refuses_two_versions_of_a_server_and_two_kvchecks() -> None:
    newer = replace(LIVE_PASSED, run_id="newer", **served(version="0.5.24"))
    (told,) = problems(LIVE_PASSED, newer)
    assert "the version of the sglang that served is 0.5.24, and 0.5.23 in run" in told
    silent = [replace(LIVE_PASSED, run_id=name, **served(version=None)) for name in ("a", "b")]
    assert len(problems(*silent)) == 1 and problems(silent[0]) == []
    assert problems(LIVE_PASSED, another("vllm"), PASSED) == []
    (mixed,) = problems(LIVE_PASSED, replace(LIVE_PASSED, run_id="b", identity=Identity(code="0" * 64)))
    assert "the code of kvcheck that judged the sglang server" in mixed
    assert any("which build of kvcheck" in each for each in problems(replace(LIVE_PASSED, identity=None)))


def test_floor_of_rounds_counts_and_min_schedules_is_about_schedules() -> None:
    assert evidence_problems([LIVE_PASSED], code=CODE, min_schedules=200) == ()
    assert PASS_ROW.coverage is not None
    low = replace(PASS_ROW, coverage=replace(PASS_ROW.coverage, floor=2))
    (told,) = problems(replace(LIVE_PASSED, scenarios=(low, HIT_ROW)))
    assert "passed after too few rounds: it needs 2, got 1" in told


def test_servers_stand_side_by_side_by_scenario() -> None:
    comparison = compare([LIVE, another("vllm")])
    (found,) = comparison.tables
    assert [column.label for column in found.columns] == ["sglang 0.5.23", "vllm 0.32.0"]
    rows = {row.id: [cell.name for cell in row.cells] for group in found.groups for row in group.rows}
    assert rows["hicache"] == ["pass", "pass"] and rows["prefix-cache"] == ["fail", "not run"]
    assert rows["require/hit"] == ["pass", "pass"] and rows["require/retract"] == ["unknown", "not run"]
    assert comparison.verdict is Verdict.FAIL
    page, text = compared_page(comparison), compared_md(comparison)
    assert "640 tokens judged, hit 8 requests" in page and "| hicache | pass" in text and MARKUP not in page
    lines = list(csv.DictReader(io.StringIO(compared_csv(comparison))))
    assert {line["kind"] for line in lines} == {"cell"}
    assert next(line for line in lines if line["cell"] == "hicache")["tokens"] == "640"


def test_engine_and_version_of_a_server_stay_text() -> None:
    hostile = replace(LIVE_PASSED, **served(engine=f"{MARKUP}|x", version="\x1b[2J\n# big"))
    comparison = compare([hostile])
    for text in (compared_page(comparison), compared_md(comparison), render(hostile)):
        assert "<script>alert" not in text and "\x1b" not in text
    assert "<script>alert" not in render(LIVE) and "&lt;script&gt;" in table(render(LIVE), "server")
    assert "\n# big" not in compared_md(comparison)


def test_server_run_beside_a_plain_run_has_a_table_of_its_own() -> None:
    comparison = compare([LIVE_PASSED, PASSED])
    assert [found.engine for found in comparison.tables] == ["servers", "builtin"]
    assert [group.title for group in comparison.tables[0].groups] == [None, None]
    assert comparison.verdict is Verdict.PASS
    for text in (compared_page(comparison), compared_md(comparison), compared_csv(comparison)):
        assert ("sglang" in text and "5,920 words" in text) or "5920" in text
