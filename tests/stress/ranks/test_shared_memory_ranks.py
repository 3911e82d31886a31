"""Ranks that share memory, as real processes: ways of the metadata, copies that land behind their status, deaths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rigs.settings import with_settings
from rigs.troubled_rank import STATUS_BELIEVED
from stress.ranks.test_real_processes import EVERY, check_survivors, importable, plan_of, run

from kvcheck.commands.main import run as command_line
from kvcheck.core.base.record import read_record
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.ranks.stalls import FOR_EVER_FROM
from kvcheck.core.stress.scenarios.pd_transfer import MESSAGES

__all__ = ["importable"]

LATE_S = 1.0
LONG_S = 2.0
"""Long enough for a reader that does not wait, also where other processes take its core."""
SHORT = "fault kind:short lists, refusals"
"""Faults that no rank has to wait for."""


def shared(way: str, shape: str = "llama-3-tiny", ranks: str = "1x1", *also: str) -> Plan:
    """A plan with metadata on that way; in it requests 5 and 10 have faults, except where rows are messages."""
    plan = replace(plan_of(shape=shape, ranks=ranks), transport="ipc", scenario="nvlink-aux", schedule=0)
    return with_settings(plan, SHORT, f"metadata path:{way}", *also, every=1 if way == MESSAGES else EVERY)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("way", "shape", "ranks"),
    [("async", "gpt-oss-tiny", "1x2"), ("ordered", "llama-3-tiny", "1x1"), (MESSAGES, "llama-3-tiny", "1x1")],
)
def test_every_request_arrives_on_every_way_of_the_metadata(way: str, shape: str, ranks: str) -> None:
    plan = shared(way, shape, ranks)
    supervisor, judged = run(plan if way != MESSAGES else replace(plan, requests=FOR_EVER_FROM - 1), {})
    assert judged.findings == ()
    assert judged.verified == judged.expected > 0
    for name, report in supervisor.reports.items():
        assert report.summary is not None
        if name.startswith("decode"):
            assert len(report.finished) >= 3 and report.failed and report.summary.quarantined > 0
    assert any(report.faulted for report in supervisor.reports.values())
    assert supervisor.reports["prefill-0"].stalled


@pytest.mark.processes
def test_a_pass_says_that_a_device_and_nvlink_were_not_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["stress", "nvlink-aux", "--shape", "llama-3-tiny", "--transport", "ipc", "--requests", "6"]
    assert command_line([*command, "--seed", "1", "--no-reports", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "nvlink-aux over ipc" in said
    assert " not tried    copies of a device, and NVLink: on a host, bytes land in the order in which its CPU" in said
    (record,) = (read_record(path) for path in tmp_path.glob("*/run.json"))
    assert any(each.startswith("not tried: copies of a device") for each in record.warnings)


def late(leg: str, request: int, mutant: str = "", late_s: float = LONG_S) -> dict[str, dict[str, object]]:
    """The copies of a leg of a request are late at the writer; both ends are made of the mutant's parts."""
    lie = {"requests": [request], "leg": leg, "late_s": late_s, "on_lane": True}
    return {"prefill-0": {"lie": lie, "mutant": mutant}, "decode-0": {"mutant": mutant}}


@pytest.mark.processes
def test_a_status_before_its_bytes_is_not_believed() -> None:
    supervisor, judged = run(shared("async"), late("kv", 2, late_s=LATE_S))
    assert judged.findings == () and judged.verified == judged.expected
    assert {2, 3, 6, 7} <= supervisor.reports["decode-0"].finished.keys()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mutant", "leg", "shape", "request_id"),
    [
        (STATUS_BELIEVED, "kv", "llama-3-tiny", 2),
        ("seal-without-state", "state", "gpt-oss-tiny", 2),
        ("old-seal-believed", "kv", "llama-3-tiny", 7),
    ],
)
def test_a_reader_that_believes_too_early_reads_what_has_not_landed(
    mutant: str, leg: str, shape: str, request_id: int
) -> None:
    """What is behind it on its lane is late too. Request 7 gets a slot where an earlier one has left its seal."""
    _, judged = run(shared("async", shape), late(leg, request_id, mutant))
    assert {"KV102", "KV103", "KV104"} & {each.code for each in judged.findings if each.oracle == "content"}


@pytest.mark.processes
def test_memory_that_a_peer_may_write_is_not_given_back() -> None:
    """Request 1 is aborted by the decode end while its KV is on its way."""
    plan = shared("async", "llama-3-tiny", "1x1", "abort stage:late")
    _, judged = run(plan, late("kv", 1, "slot-freed-before-drain", late_s=3.0))
    found = [each for each in judged.findings if each.code == "KV202"]
    assert found and all("while prefill-0 may still write it" in each.message for each in found)


@pytest.mark.processes
@pytest.mark.parametrize(("rank", "at", "number"), [("prefill-0", "wrote", 5), ("decode-0", "receive", 3)])
def test_a_killed_rank_leaves_the_other_clean(rank: str, at: str, number: int) -> None:
    """The writer dies while its copies are under way; the reader, while copies into its memory are."""
    check_survivors(shared("async"), rank, at, number)
