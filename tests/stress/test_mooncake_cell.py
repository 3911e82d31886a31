"""The Mooncake cell joins a run that names nothing against it, over stand-ins for engine, network and schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcheck.commands.main import run
from kvcheck.commands.options import check_plan
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.record import Evidence, Finding, RunRecord, Verdict, read_record
from kvcheck.core.report.comparison.compare import compare
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.report.gate.result import evidence_problems
from kvcheck.core.report.to_csv import tables
from kvcheck.core.report.to_html import render
from kvcheck.core.run.outcome import Outcome, complete
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.run.runners import RunnerRow
from kvcheck.core.stress.mooncake_cell import SIMULATED, MooncakeCell, mooncake_cell
from kvcheck.core.stress.ranks.runner import RANKS
from kvcheck.core.stress.rows import SCHEDULE

NAME = "pd-transfer/llama-3-tiny/mooncake"
RUN = ["stress", "pd-transfer", "--shape", "llama-3-tiny", "--seed", "3", "--schedules", "3"]


class Network:
    """A network namespace that was made, or was not."""

    why = "the system refuses a network namespace (Operation not permitted)"

    def __init__(self, path: str | None) -> None:
        self.path = path

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.path = None


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Mooncake can be used; called, it says why it cannot."""

    def set_up(why: str | None = None, path: str | None = "/proc/1/ns") -> None:
        monkeypatch.setattr("kvcheck.core.stress.mooncake_cell.why_unusable", lambda: why)
        monkeypatch.setattr("kvcheck.core.stress.mooncake_cell.PrivateNetwork", lambda: Network(path))
        monkeypatch.setattr("kvcheck.core.stress.ranks.runner.require_library", lambda: "0.3.13.post1")

    set_up()
    yield set_up


def cell(*plans: Plan, transport: str | None = None, **limits: Any) -> MooncakeCell:
    found = mooncake_cell(plans, transport=transport, **({"max_time_s": None, "least": None} | limits))
    assert isinstance(found, MooncakeCell)
    return found


def test_it_joins_a_run_by_default(usable: Callable[..., None]) -> None:
    simulated = replace(SIMULATED, seed=7)
    found = cell(replace(simulated, shape="gpt-oss-tiny"), simulated, max_time_s=120, least=3)
    (plan,) = found.plans
    assert (plan.cell, plan.has_rank_processes, plan.seed, found.untried) == (NAME, True, 7, ())
    assert plan.cell != simulated.cell and parse_line(plan.line()) == plan and found.cpu_s > 0
    check_plan(plan)  # it can be named, and its line can be replayed


@pytest.mark.parametrize(
    "named",
    [
        "mutant=abort-said-once",
        "shape=gpt-oss-tiny",
        "strategy=lazy",
        "ranks=2x2",
        "trace=sample",
        "transport=loopback",
    ],
)
def test_it_is_no_part_of_a_run_that_names_something_else(named: str, usable: Callable[..., None]) -> None:
    what, value = named.split("=")
    found = cell(SIMULATED, transport=value) if what == "transport" else cell(replace(SIMULATED, **{what: value}))  # type: ignore[arg-type]
    assert found == MooncakeCell()


@pytest.mark.parametrize(
    ("state", "limits", "why"),
    [
        ({"why": "the library could not be loaded: libnuma.so.1; next: apt-get"}, {}, "libnuma.so.1; next: apt-get"),
        ({"path": None}, {}, "refuses a network namespace (Operation not permitted), so its engine would listen"),
        ({}, {"max_time_s": 119.0}, "--max-time 119 is short for it; next: --max-time 120 or more"),
        ({}, {"least": 4}, "--min-schedules asks for 4; next: kvcheck stress pd-transfer --shape llama-3-tiny "),
    ],
    ids=["library", "network", "time", "schedules"],
)
def test_where_it_cannot_run_a_line_says_why(
    state: dict[str, str | None], limits: dict[str, float], why: str, usable: Callable[..., None]
) -> None:
    usable(**state)
    found = cell(SIMULATED, **limits)
    assert found.plans == () and found.cpu_s == 0
    (line,) = found.untried
    assert line.startswith(f"not tried: {NAME}, ") and why in line and "; next" in line


class StandIn:
    """A runner that gives one outcome each time, or raises behind some of them."""

    def __init__(self, *findings: Finding, error: BaseException | None = None, after: int = 0) -> None:
        self._findings, self._error, self._after = findings, error, after
        self.ran: list[str] = []

    cpu_s = 0.0

    def run(self, plan: Plan) -> Outcome:
        self.ran.append(plan.line())
        if self._error is not None and len(self.ran) > self._after:
            raise self._error
        found = tuple(complete(each, plan) for each in self._findings)
        evidence = Evidence(schedules=1, transfers=3, words_verified={"sealed": 8})
        return Outcome(plan=plan, findings=found, evidence=evidence, digest=0, judged={"bytes": 64})

    def gap(self, plan: Plan, total: Evidence) -> str | None:
        return None

    def closing(self) -> str | None:
        return None


def replaced(patch: pytest.MonkeyPatch, row: RunnerRow, runner: StandIn) -> None:
    patch.setattr(row, "make", lambda plan, target_of: runner)


def ran(
    patch: pytest.MonkeyPatch, out: Path, *options: str, ranks: StandIn, simulated: StandIn | None = None
) -> tuple[int, RunRecord]:
    """The exit code and record of a run of stand-ins."""
    replaced(patch, RANKS, ranks)
    replaced(patch, SCHEDULE, simulated or StandIn())
    code = run([*RUN, "--no-reports", "--out", str(out), *options])
    newest = sorted(out.glob("*/run.json"), key=lambda path: path.stat().st_mtime_ns)[-1]
    return code, read_record(newest)


def test_its_finding_is_its_own_in_every_report(
    usable: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = StandIn(Finding(code="KV301", oracle="protocol", message="two bytes are missing"))
    code, record = ran(monkeypatch, tmp_path, ranks=ranks)
    assert code == 1
    assert {row.id: (row.verdict, row.schedules) for row in record.scenarios} == {
        "pd-transfer/llama-3-tiny": (Verdict.PASS, 3),
        NAME: (Verdict.FAIL, 1),
    }
    (finding,) = record.findings
    assert finding.cell == NAME and parse_line(finding.schedule).cell == NAME
    assert contradictions(record) == []
    assert NAME in render(record) and f",{NAME},llama-3-tiny/mooncake,fail" in tables(record)["scenarios.csv"]
    (table,) = compare([record]).tables
    rows = {row.id: row.cells[0] for group in table.groups for row in group.rows}
    assert rows[NAME].replay == finding.replay and rows[NAME].verdict is Verdict.FAIL
    assert "transport" not in rows["pd-transfer/llama-3-tiny"].replay
    capsys.readouterr()
    assert run(["replay", finding.id, "--out", str(tmp_path)]) == 1
    assert f"STILL FAILS 1/1  {NAME}: KV301 two bytes are missing" in capsys.readouterr().out


def test_an_interrupted_run_goes_on_with_its_other_cells(
    usable: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = StandIn()
    simulated = StandIn(error=KeyboardInterrupt(), after=3)
    code, record = ran(monkeypatch, tmp_path, "--schedules", "4", ranks=ranks, simulated=simulated)
    assert code == 130 and {row.id: row.verdict for row in record.scenarios}[NAME] is Verdict.PASS
    code, record = ran(monkeypatch, tmp_path, "--schedules", "4", "--resume", ranks=ranks)
    assert code == 0 and len(ranks.ran) == 3, "the cell was done"
    assert {row.id: row.schedules for row in record.scenarios} == {"pd-transfer/llama-3-tiny": 4, NAME: 3}
    assert record.identity is not None and record.identity.code is not None
    assert evidence_problems([record], code=record.identity.code) == ()
    problems = evidence_problems([record], code=record.identity.code, min_schedules=4)
    (problem,) = [each for each in problems if NAME in each.message]
    assert "--min-schedules asks for 4, got 3" in problem.message and "--transport loopback" in problem.message


def test_trouble_of_the_machine_is_unknown_and_ends_no_other_cell(
    usable: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ranks = StandIn(error=UnknownVerdict("prefill-0 ended with status 1; its ranks had not met"))
    code, record = ran(monkeypatch, tmp_path, ranks=ranks)
    assert code == 4 and record.findings == ()
    rows = {row.id: row for row in record.scenarios}
    assert rows["pd-transfer/llama-3-tiny"].verdict is Verdict.PASS
    assert rows[NAME].verdict is Verdict.UNKNOWN and "its ranks had not met" in str(rows[NAME].reason)


def test_a_green_run_without_the_library_passes_and_says_what_it_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcheck.core.cache.transfer.mooncake.library._version_of", lambda build: None)
    code, record = ran(monkeypatch, tmp_path, ranks=StandIn())
    assert code == 0 and [row.id for row in record.scenarios] == ["pd-transfer/llama-3-tiny"]
    (line,) = record.warnings
    assert line.startswith(f"not tried: {NAME}, ") and "next: pip install 'mooncake-transfer-engine-non-cuda" in line
    told = capsys.readouterr().out.splitlines()
    why, _, command = line.partition("; next: ")
    at = told.index(why.replace("not tried: ", " not tried    "))
    assert told[at + 1].strip() == f"next: {command}" and told[-1] == " exit 0"
    assert f"not tried: {NAME}" in render(record)
    assert run(["stress", "pd-transfer", "--transport", "mooncake"]) == 4
    assert "pip install 'mooncake-transfer-engine-non-cuda" in capsys.readouterr().err


@pytest.mark.mooncake
@pytest.mark.processes
def test_a_run_has_it_where_the_engine_can_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One schedule, which is too few for a pass: three take a minute."""
    replaced(monkeypatch, SCHEDULE, StandIn())
    assert run([*RUN, "--schedules", "1", "--no-reports", "--out", str(tmp_path)]) == 4
    (path,) = tmp_path.glob("*/run.json")
    record = read_record(path)
    assert record.findings == () and contradictions(record) == []
    assert [(row.id, row.schedules) for row in record.scenarios] == [("pd-transfer/llama-3-tiny", 1), (NAME, 1)]
    assert record.scenarios[1].evidence.words_verified["sealed"] > 0
    assert any(line.startswith(f"{NAME}: 1x1 processes over mooncake, ") for line in record.warnings)
