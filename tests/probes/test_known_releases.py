"""Known releases: a subject that a release has dropped has no cell, and conditions that were reviewed take a line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fakes.engine import environment
from rigs.literal_record import PASSED

from kvcheck.commands.main import run
from kvcheck.commands.probes import reviewed_findings
from kvcheck.core.base.record import Evidence, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.probes.frame.engine_process import Patience
from kvcheck.core.probes.installed import ENGINES, parse_target
from kvcheck.core.report.screen import cause_lines

DROPPED = "prefix-cache/prefixes.mamba"
CELL = "pd-transfer/state-lengths.swa-longer"


def release(folder: Path, version: str, fault: str = "") -> Path:
    """An environment whose stand-in says that it is this release."""
    made = environment(folder, fault)
    (site,) = made.glob("lib/python*/site-packages")
    info = site / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    return made


@pytest.mark.processes(starts=True)
@pytest.mark.parametrize(
    ("version", "has_tree", "gone"),
    [
        ("0.5.23", False, {DROPPED}),  # and not prefixes.swa: the stand-in lacks its pool too
        ("0.5.22", False, {DROPPED}),
        ("0.5.24", False, set()),
        ("0.5.23.post1", False, set()),
        ("0.5.23", True, set()),
    ],
)
def test_a_row_is_of_its_releases_and_capability(tmp_path: Path, version: str, has_tree: bool, gone: set[str]) -> None:
    made = release(tmp_path / "env", version)
    if has_tree:
        (site,) = made.glob("lib/python*/site-packages")
        name = "sglang.srt.mem_cache.mamba_radix_cache"
        tree = f"made = sys.modules['{name}'] = types.ModuleType('{name}')\nmade.MambaRadixCache = object\n"
        (site / "tree_that_came_back.py").write_text(f"import sys, types\n{tree}")
        (site / "tree_that_came_back.pth").write_text("import tree_that_came_back\n")
    child = parse_target(f"sglang:{made}").start(Patience())
    child.close()
    assert {*child.hello.absent} == gone


@pytest.mark.processes(starts=True)
def test_what_a_release_dropped_is_a_line_and_no_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["probe", "--schedules", "12", "--seed", "1", "--out", str(tmp_path / "runs"), "--no-reports"]
    base += ["--probe", "prefixes.mamba"]
    known = f"sglang:{release(tmp_path / 'known', '0.5.23')}"
    assert run([*base, known, "--probe", "metadata", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in record["scenarios"]] == ["retract-resume/metadata.get-buf"]
    assert sum(line.startswith("prefix-cache/prefixes.mamba: not in this release") for line in record["warnings"]) == 1
    assert run([*base, known]) == 4, "nothing was judged"
    told = [line for line in capsys.readouterr().out.splitlines() if "prefixes.mamba" in line]
    assert len(told) == 1 and "not in this release" in told[0]
    unknown = f"sglang:{release(tmp_path / 'unknown', '0.5.24')}"
    assert run([*base, unknown, "--probe", "metadata"]) == 4
    assert "has no tree.mamba" in capsys.readouterr().out


def conditional(code: str, place: str) -> Finding:
    return Finding(
        id=f"r.{code}{place}",
        code=code,
        oracle="contract",
        scenario="pd-transfer",
        shape="state-lengths.swa-longer",
        lane=place,
        message="1 of 2 rows",
        schedule="pd-transfer:shape=state-lengths.swa-longer,target=sglang%3A/env,seed=1,schedule=0",
        condition="lists of unequal length",
    )


def judged(version: str, verdict: Verdict, *findings: Finding) -> RunRecord:
    row = ScenarioResult(id=CELL, shape="state-lengths.swa-longer", verdict=verdict, evidence=Evidence(schedules=1))
    engine = {"engine": "sglang", "version": version}
    return replace(PASSED, scenarios=(row,), findings=findings, environment={"engine": engine})


def shown(record: RunRecord) -> list[str]:
    return cause_lines(record, 200, reviewed_findings(record, record.findings), is_kept=True)


def test_reviewed_conditions_take_one_line_and_hide_no_other_finding() -> None:
    known = conditional("KV301", "lengths, prefill longer at the start")
    others = (conditional("KV301", "lengths, prefill longer at the end"), conditional("KV102", known.lane or ""))
    line, _ = shown(judged("0.5.23", Verdict.PASS, known))
    assert CELL in line and "reviewed" in line
    for other in others:
        block = shown(judged("0.5.23", Verdict.PASS, known, other))
        assert sum("only if" in line for line in block) == 1 and sum("reviewed" in line for line in block) == 1
    for record in (judged("0.5.24", Verdict.PASS, known), judged("0.5.23", Verdict.FAIL, known)):
        assert sum("only if" in line for line in shown(record)) == 1
    certain = replace(known, condition=None)
    assert not any("reviewed" in line for line in shown(judged("0.5.23", Verdict.FAIL, certain)))


def test_rows_name_subjects_and_capabilities_that_exist() -> None:
    for spec in map(ENGINES.load, ENGINES.names()):
        for row in spec.probes:
            assert {each.subject for each in (*row.dropped, *row.reviewed)} <= {*row.subjects}
            assert {each.lacks for each in row.dropped} <= {*spec.table}
            assert all(each.releases and each.why for each in (*row.dropped, *row.reviewed))
