"""Counted nouns: the plural of each noun that kvcheck counts, and no text of a report that says "1 cells".

Invariants:
- Each report is made from a record in which everything was counted once.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import replace

import pytest
from report.test_gate_result import gate
from rigs.literal_record import FAILED, FOREIGN, PASSED
from rigs.live_record import LIVE

from kvcheck.commands.gate_lines import result_lines
from kvcheck.commands.terminal import cell_lines, findings_block, left_out_lines, verdict_lines
from kvcheck.core.base.nouns import counted, counted_field, plural
from kvcheck.core.base.record import Coverage, Evidence, RunRecord
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.comparison.to_md import render as compared
from kvcheck.core.report.gate.to_md import render as gate_markdown
from kvcheck.core.report.to_html import render as page

COUNTS = [row.name for row in dataclasses.fields(Evidence) if row.type == "int" or row.type == "int | None"]
ONCE = Evidence(**dict.fromkeys(COUNTS, 1), words_verified={"latent": 1})
SLIP = re.compile(r"(?<![\w.,:/+-])1 (?!was\b|its\b|this\b)((?:[a-z]+ )?[a-z]+(?<!s)s)\b")
"""One of something in the plural, at most one word behind the number."""


@pytest.mark.parametrize(
    ("noun", "many"),
    [
        *(("cell", "cells"), ("process", "processes"), ("retry", "retries"), ("delay", "delays")),
        *(("policy", "policies"), ("planned schedule", "planned schedules"), ("search", "searches")),
    ],
)
def test_the_plural_is_for_all_numbers_but_one(noun: str, many: str) -> None:
    assert [counted(number, noun) for number in (0, 1, 2, 1000)] == [
        f"0 {many}",
        f"1 {noun}",
        f"2 {many}",
        f"1,000 {many}",
    ]
    assert (plural(1, noun), plural(0, noun)) == (noun, many)


@pytest.mark.parametrize(
    ("name", "one"),
    [
        *(("schedules", "1 schedule"), ("retries", "1 retry"), ("pages_wanted", "1 page wanted")),
        *(("host_evictions_during_load", "1 host eviction during load"), ("orderings_checked", "1 ordering checked")),
    ],
)
def test_fields_of_the_evidence_have_a_singular(name: str, one: str) -> None:
    assert counted_field(1, name) == one
    assert counted_field(2, name) == f"2 {name.replace('_', ' ')}"


def test_the_pattern_finds_slips_and_nothing_else() -> None:
    for text in ("1 cells", "x 1 schedules, 1 event", "(1 retries)", " 1 host evictions"):
        assert SLIP.search(text), text
    for text in ("1 cell", "11 cells", "1,001 cells", "0.1 cells", "1 process", "page 1 was read", "1/24 schedules"):
        assert not SLIP.search(text), text


def _once(record: RunRecord) -> RunRecord:
    (row,) = record.scenarios
    coverage = Coverage(wanted=1, floor=1, tried=("eager", "delay:a"), not_tried=("delay:b", "chunk:1", "policy:x"))
    row = replace(row, schedules=1, evidence=ONCE, coverage=coverage)
    return replace(record, scenarios=(row,), evidence=ONCE)


def _texts(record: RunRecord) -> list[str]:
    lines = [line for row in record.scenarios for line in cell_lines(row)]
    lines += [*left_out_lines(record), *findings_block(record.findings), *verdict_lines(record)]
    judged = gate(record)
    whole = [re.sub(r"<(style|script|template)\b.*?</\1>|<[^>]+>", " ", page(record), flags=re.DOTALL)]
    return [*lines, *result_lines(judged), gate_markdown(judged), compared(compare([record])), *whole]


@pytest.mark.parametrize("kind", ["passed", "failed", "unjudged", "server"])
def test_no_text_counts_one_in_the_plural(kind: str) -> None:
    once = _once(PASSED)
    symptom = replace(FOREIGN, id="2", code="KV501", oracle="output", cause="1", message="another token")
    (row,) = LIVE.scenarios[:1]
    observed = {"token": 1, "hit": 1, "hit-token": 1, "evict": 1, "retract": 1}
    asked = Evidence(schedules=1, requests=1, observed=observed)
    record = {
        "passed": once,
        "failed": replace(
            once, findings=(FOREIGN, symptom), verdict=FAILED.verdict, exit_code=1, mutants=FAILED.mutants[:1]
        ),
        "unjudged": replace(once, scenarios=(replace(once.scenarios[0], verdict=FAILED.scenarios[2].verdict),)),
        "server": replace(
            LIVE,
            scenarios=(replace(row, schedules=1, evidence=asked, coverage=Coverage(wanted=1, floor=1)),),
            evidence=asked,
            findings=(),
        ),
    }[kind]
    for text in _texts(record):
        found = SLIP.search(text)
        assert found is None, text[max(0, found.start() - 60) : found.end() + 20]
