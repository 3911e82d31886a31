"""Ranks as real processes: green runs with the bytes counted apart, engines that lie, and ranks that are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rigs.live_processes import children_of, is_alive, poll
from rigs.settings import with_settings

from kvcheck.commands.main import run as command_line
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import Plan, parse_line
from kvcheck.core.stress.plan_scenario import variant_of
from kvcheck.core.stress.ranks.spec import pair_scenario, work_of
from kvcheck.core.stress.ranks.supervisor import RankReport, Supervisor
from kvcheck.core.stress.ranks.verdict import RankJudgement, judge
from kvcheck.core.stress.rows import settings_tried_by
from kvcheck.core.stress.scenarios.serving import reference_outputs
from kvcheck.core.stress.workload.handover import bytes_for

PROJECT = Path(__file__).parents[3]
TRANSPORTS = ["tcp", pytest.param("mooncake", marks=pytest.mark.mooncake)]
SETTINGS = ("abort stage:late", "prefill chunk:2 pages", "fault kind:short lists, refusals", "faulty rank:all")
EVERY = 15
"""In variants whose number is a multiple of it, requests 5 and 10 have faults, and 2 and 8 a leg that is held."""


def plan_of(**fields: str) -> Plan:
    """A plan in which it is known what is done to which request, whatever its shape and ranks."""
    plan = Plan(
        scenario="pd-transfer", shape="llama-3-tiny", backend="eager", transport="tcp", ranks="1x1", seed=5, requests=10
    )
    return with_settings(replace(plan, **fields), *SETTINGS, every=EVERY)


PLAN = plan_of()


class TroubledSupervisor(Supervisor):
    """Says by a file when all ranks are ready: trouble that comes before is another matter, the run ends with it."""

    program = "rigs.troubled_rank"

    def run(self) -> Mapping[str, RankReport]:
        with TemporaryDirectory() as folder:
            self._all_ready = Path(folder) / "ready"
            self._extra = {rank: {**each, "all_ready": str(self._all_ready)} for rank, each in self._extra.items()}
            return super().run()

    def _take(self, name: str, event: dict[str, object] | None) -> None:
        super()._take(name, event)
        if len(self._ready) == len(self.reports):
            self._all_ready.touch()


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}{os.pathsep}{PROJECT / 'tests'}")


def run(
    plan: Plan, extra: Mapping[str, dict[str, object]], *, killed: frozenset[str] = frozenset(), patience_s: int = 20
) -> tuple[TroubledSupervisor, RankJudgement]:
    """A run with trouble in it, judged; and nobody left of it."""
    supervisor = TroubledSupervisor(plan, extra=extra, silence_s=60, patience_s=patience_s)
    return supervisor, outcome(supervisor, plan, troubled=killed)


def outcome(supervisor: Supervisor, plan: Plan, *, troubled: frozenset[str]) -> RankJudgement:
    reports = supervisor.run()
    pids = [supervisor.pid(name) for name in reports]
    assert poll(lambda: not any(map(is_alive, pids)))
    shape, load = work_of(plan)
    reference = reference_outputs(shape, load)
    return judge(reports, shape, load, reference, silence=supervisor.silence, troubled=troubled)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "shape", "ranks", "scenario"),
    [
        ("tcp", "llama-3-tiny", "2x2", "pd-transfer"),
        pytest.param("tcp", "gpt-oss-tiny", "1x2", "nvlink-aux", marks=pytest.mark.processes(starts=True)),
        pytest.param("mooncake", "llama-3-tiny", "2x2", "pd-transfer", marks=pytest.mark.mooncake),
    ],
)
def test_every_request_arrives_and_its_bytes_are_counted_apart(
    transport: str, shape: str, ranks: str, scenario: str
) -> None:
    plan = plan_of(transport=transport, shape=shape, ranks=ranks, scenario=scenario)
    supervisor, judged = run(plan, {})
    assert judged.findings == ()
    assert judged.verified == judged.expected > 0
    check_what_was_done(supervisor)
    for name, report in supervisor.reports.items():
        assert report.summary is not None
        if name.startswith("decode"):
            assert {2, 3, 6, 7} <= report.finished.keys(), "to these nothing was done but to hold a leg"
            assert report.summary.quarantined > 0


def check_what_was_done(supervisor: Supervisor) -> None:
    """Every request of the first schedule is where it has to be: two have faults, and up to four are aborted."""
    reports = supervisor.reports.values()
    aborted = {request for report in reports for request in report.aborted}
    assert aborted and aborted <= {1, 4, 8, 9}
    assert {request for report in reports for request in report.faulted} == {5, 10}
    assert {request for report in reports for request in report.stalled} >= {2}
    for report in (each for each in reports if each.name.startswith("decode")):
        assert report.finished.keys() | report.failed.keys() | report.aborted == set(range(1, 11))
        assert {5, 10} <= report.failed.keys() <= {5, 10} | aborted


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "leg", "shape", "late_s"),
    [
        pytest.param("mooncake", "kv", "llama-3-tiny", 0, marks=pytest.mark.mooncake),
        ("tcp", "aux", "llama-3-tiny", 0),
        ("tcp", "state", "gpt-oss-tiny", 0),
        ("ipc", "seal", "llama-3-tiny", 0),
        ("tcp", "kv", "llama-3-tiny", 4.0),
    ],
)
def test_an_engine_that_says_done_too_early_turns_the_run_red(
    transport: str, leg: str, shape: str, late_s: float
) -> None:
    plan = plan_of(transport=transport, shape=shape)
    lie: dict[str, object] = {"lie": {"requests": [3], "leg": leg, "late_s": late_s}}
    supervisor, judged = run(plan, {"prefill-0": lie}, patience_s=2)
    report = supervisor.reports["decode-0"]
    assert 3 in report.failed and "nothing complete from prefill-0" in report.failed[3]
    assert {found.request for found in judged.findings if found.code == "KV604"} == {3}
    assert {2, 6, 7} <= report.finished.keys()


@pytest.mark.processes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_bytes_that_come_after_the_engine_said_so_are_waited_for(transport: str) -> None:
    lie: dict[str, object] = {"lie": {"requests": [3, 6], "leg": "kv", "late_s": 1.0}}
    supervisor, judged = run(plan_of(transport=transport), {"prefill-0": lie})
    assert judged.findings == () and judged.verified == judged.expected
    assert {2, 3, 6, 7} <= supervisor.reports["decode-0"].finished.keys()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "ranks", "rank", "at", "number"),
    [
        ("tcp", "1x1", "prefill-0", "receive", 1),
        ("tcp", "1x1", "prefill-0", "write", 2),
        ("tcp", "1x1", "prefill-0", "wrote", 3),
        ("tcp", "1x1", "decode-0", "send", 1),
        ("tcp", "1x1", "decode-0", "receive", 3),
        ("tcp", "2x2", "prefill-1", "wrote", 2),
        pytest.param("mooncake", "1x1", "prefill-0", "wrote", 1, marks=pytest.mark.mooncake),
        pytest.param("mooncake", "1x1", "decode-0", "send", 4, marks=pytest.mark.mooncake),
        pytest.param("mooncake", "2x2", "prefill-0", "send", 3, marks=pytest.mark.mooncake),
        pytest.param("mooncake", "2x2", "decode-1", "receive", 3, marks=pytest.mark.mooncake),
    ],
)
def test_a_killed_rank_leaves_the_others_clean(transport: str, ranks: str, rank: str, at: str, number: int) -> None:
    """It dies by SIGKILL inside that call."""
    check_survivors(plan_of(transport=transport, ranks=ranks), rank, at, number)


def check_survivors(plan: Plan, rank: str, at: str, number: int) -> None:
    """Every request has finished with the right tokens or failed, and everything was given back."""
    extra: dict[str, dict[str, object]] = {rank: {"die": {"at": at, "number": number}}}
    supervisor, judged = run(plan, extra, killed=frozenset({rank}))
    assert supervisor.reports[rank].death == f"{rank} ended by signal 9"
    assert judged.findings == ()
    for name, report in supervisor.reports.items():
        if name == rank:
            continue
        assert report.summary is not None, name
        assert all(free == total for free, total in report.summary.returned.values())
        if name.startswith("decode"):
            assert sorted({*report.finished, *report.failed, *report.aborted}) == list(range(1, 11))
            assert report.failed


@pytest.mark.parametrize("ranks", ["1x1", "2x2", "1x2"])
def test_processes_run_under_the_settings_that_are_counted(ranks: str) -> None:
    for schedule in range(20):
        plan = replace(PLAN, ranks=ranks, schedule=schedule)
        assert {*settings_tried_by(plan)} <= {*pair_scenario(plan).table.variant(variant_of(plan)).names}


def test_the_bytes_of_a_prompt_are_those_of_a_sheet_of_paper() -> None:
    paper = ModelShape(name="paper", family="mha", page_size=4, full_layers=(0, 1, 2), num_kv_heads=2, head_dim=8)
    row = 64 + 64 + 64 + 64 + 512 + 512 + 64 + 128 + 64 + 64
    assert bytes_for(paper, 9, 1) == 3 * 12 * (2 * 8 + 2 * 8) * 2 + row
    assert bytes_for(paper, 8, 2) == 3 * 8 * (8 + 8) * 2 + row
    assert bytes_for(paper, 1, 4) == 3 * 4 * (8 + 8) * 2 + row  # two ranks keep each head


@pytest.mark.processes
def test_one_command_prints_both_counts_and_its_line_runs_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "pd-transfer", "--shape", "llama-3-tiny", "--transport", "tcp", "--ranks", "1x2"]
    command += ["--requests", "6", "--seed", "4"]  # no room of which waits until its time is over
    assert command_line([*command, "--no-reports", "--out", str(tmp_path)]) == 0
    said = re.search(
        r"1x2 processes over tcp, ([\d,]+) bytes verified at the receivers, ([\d,]+) expected", capsys.readouterr().out
    )
    assert said is not None and said[1] == said[2] != "0"
    line = "pd-transfer:shape=llama-3-tiny,backend=eager,transport=tcp,ranks=1x2,seed=4,schedule=0,requests=6"
    assert parse_line(line).line() == line
    assert command_line(["replay", line]) == 0
    assert "CLEAN" in capsys.readouterr().out


@pytest.mark.processes
@pytest.mark.mooncake
@pytest.mark.parametrize(("ranks", "room"), [("1x1", 3), ("2x2", 3), ("2x2", 8)])
def test_an_engine_that_dies_costs_its_room_and_no_other(ranks: str, room: int) -> None:
    """Request 8 is aborted late: one prefill rank has lost it by then, and the other has sent it.

    Requests 6 and 7 are not under way while engines are replaced, which costs each room that is written then.
    """
    extra: dict[str, dict[str, object]] = {
        f"prefill-{rank}": {"apart": {"request": room, "from": [6, 7]}} for rank in range(int(ranks[0]))
    }
    extra["prefill-0"]["break_engine_at"] = room
    supervisor, judged = run(plan_of(transport="mooncake", ranks=ranks), extra, patience_s=20)
    for name, report in supervisor.reports.items():
        assert report.summary is not None and not report.lost, name
        if name.startswith("decode"):
            assert room in report.failed and {6, 7} <= report.finished.keys()
    reasons = [report.failed[room] for report in supervisor.reports.values() if room in report.failed]
    assert any("ended by signal SIGKILL" in reason for reason in reasons)
    assert {found.code for found in judged.findings} == {"KV604"}  # failed, and nothing else: no byte, page or token


@pytest.mark.processes
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.processes(starts=True))]
)
def test_no_rank_outlives_the_command(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvcheck", "stress", "pd-transfer", "--shape", "llama-3-tiny", "--max-time", "600"]
    command += ["--transport", "tcp", "--ranks", "1x2", "--requests", "400", "--no-reports", "--out", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=tmp_path) as process:
        assert poll(lambda: len(children_of(process.pid)) == 3)
        ranks = children_of(process.pid)
        process.send_signal(number)
        assert process.wait(30) == (130 if number is signal.SIGTERM else -signal.SIGKILL)
    assert poll(lambda: not any(map(is_alive, ranks)))


@pytest.mark.processes
def test_a_rank_that_dies_unasked_is_a_finding() -> None:
    extra: dict[str, dict[str, object]] = {"prefill-0": {"die": {"at": "wrote", "number": 2}}}
    _, judged = run(PLAN, extra)
    assert [found.message for found in judged.findings if found.code == "KV902"] == ["prefill-0 ended by signal 9"]
