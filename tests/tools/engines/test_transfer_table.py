"""The tables of Mooncake's transfer engine by release and setting, made of literal runs."""

from __future__ import annotations

from dataclasses import replace

from rigs.literal_record import PASSED

from kvcheck.core.base.record import Evidence, Finding, RunRecord, ScenarioResult, Verdict
from tools.engines.transfer_table import SHAPES, markdown, table


def found(shape: str, code: str, lane: str, rate: str) -> Finding:
    return Finding(code=code, oracle="landing", scenario="landing", shape=shape, lane=lane, message=f"{rate} writes")


def run(version: str, *findings: Finding, **settings: str) -> RunRecord:
    """A run of the table's cells, with ten writes and notifications each."""
    counted = Evidence(schedules=3, transfers=10, orderings_checked=10, words_verified={"64 B": 80})
    rows = tuple(
        ScenarioResult(id=f"landing/{shape}", shape=shape, verdict=Verdict.UNKNOWN, schedules=3, evidence=counted)
        for shape in SHAPES
    )
    return replace(
        PASSED,
        run_id=f"run-{version}",
        scenarios=rows,
        findings=findings,
        plan={"engine_env": settings},
        environment={"engine": {"engine": "mooncake", "version": version}},
    )


WRONG = run(
    "0.3.9",
    found("landing.sync", "KV203", "early", "3 of 10"),
    found("landing.batch", "KV103", "torn", "1 of 10"),
    found("landing.frozen", "KV203", "early", "9 of 10"),
    found("registration.batch", "KV308", "beyond the end", "3 of 3"),
    found("notification.batch", "KV203", "notification", "2 of 10"),
    replace(found("landing.sync", "KV203", "early", "5 of 10"), condition="memory is used again"),
    MC_TCP_PROTO="1",
)


def test_a_row_counts_each_way_in_which_a_write_was_wrong() -> None:
    head, _, wrong, right = markdown([WRONG, run("0.3.13.post1")])
    assert wrong.count("|") == head.count("|")
    assert wrong == "| 0.3.9 | `MC_TCP_PROTO=1` | 20 | 3, 1, 0, 0 | 10 | 9 | 1 of 6 | 10 | 2 |"
    assert right == "| 0.3.13.post1 | none | 20 | 0 | 10 | 0 | 0 of 6 | 10 | 0 |"


def test_a_cell_has_its_rates_and_no_conditional_finding() -> None:
    head, sync, *others = table([WRONG]).splitlines()
    assert head.startswith("release,settings,cell") and len(others) == len(SHAPES) - 1
    assert sync.startswith("0.3.9,MC_TCP_PROTO=1,landing.sync,UNKNOWN,3,10,80,KV203 early: 3 of 10,")
