"""`kvcheck merge` from outside: shards add up to the whole, and what cannot be taken together is refused."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.report.merging import SCOPE
from kvcheck.core.run.turns import scope_text

CELLS = ["retract-resume", "--shape", "llama-3-micro", "--shape", "deepseek-v3-micro", "--requests", "3"]
WORDS = ["stress", *CELLS, "--strategy", "answers:1", "--schedules", "1", "--jobs", "1", "--no-reports"]
FAILING = ["stress", "--mutant", "offload-skips-index-buffer", "--shape", "glm-5.1-micro", "--requests", "3"]
STRESS = ["stress", "retract-resume", "--shape", "llama-3-micro", "--requests", "3", "--jobs", "1", "--no-reports"]


def made(out: Path, words: list[str], code: int | None = 0) -> Path:
    """The folder of the run that the command leaves. code: None takes any."""
    before = {path for path in out.iterdir() if path.is_dir()} if out.is_dir() else set()
    assert run([*words, "--out", str(out)]) == code or code is None
    (folder,) = {path for path in out.iterdir() if (path / "run.json").is_file()} - before
    return folder


def merged(out: Path, folders: list[Path], code: int = 0) -> RunRecord:
    return read_record(made(out, ["merge", "--no-reports", *map(str, folders)], code))


def judged(record: RunRecord) -> object:
    """The verdicts and the evidence of a record."""
    rows = [(row.id, row.verdict, row.evidence, row.coverage and row.coverage.scope) for row in record.scenarios]
    return rows, record.verdict, record.exit_code, record.evidence, record.identity


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three shards of a run, each under its number."""
    return tmp_path_factory.mktemp("shards")


@pytest.fixture
def three(shards: Path) -> list[Path]:
    if not [*shards.iterdir()]:
        for number in (1, 2, 3):
            made(shards / f"{number}", [*WORDS, "--seeds", "1-3", "--shard", f"{number}/3"], None)
    return [next((shards / f"{number}").iterdir()) for number in (1, 2, 3)]


@pytest.mark.schedules
@pytest.mark.processes
def test_shards_add_up_to_the_whole(tmp_path: Path, three: list[Path]) -> None:
    whole = read_record(made(tmp_path / "whole", [*WORDS, "--seeds", "1-3"]))
    found = merged(tmp_path / "merged", three[::-1])
    assert judged(found) == judged(whole)
    assert found.verdict is Verdict.PASS and contradictions(found) == []
    assert Verdict.UNKNOWN in {read_record(each).verdict for each in three}, "one of them lacks evidence by itself"


@pytest.mark.schedules
@pytest.mark.processes
def test_a_missing_shard_is_unknown_and_named(tmp_path: Path, three: list[Path]) -> None:
    found = merged(tmp_path / "merged", three[::2], 4)
    assert found.verdict is Verdict.UNKNOWN and contradictions(found) == []
    assert {row.reason for row in found.scenarios} == {
        "1 shard missing, first 2/3 of seeds 1-3: run all and merge them"
    }
    assert {row.verdict for row in found.scenarios} == {Verdict.UNKNOWN}
    assert found.plan["merged"] == [each.name for each in three[::2]]
    assert run(["merge", str(three[1]), str(next((tmp_path / "merged").iterdir())), "--out", str(tmp_path)]) == 2


def planned(record: RunRecord, **keys: object) -> RunRecord:
    return dataclasses.replace(record, plan={**record.plan, **keys})


def edited(folder: Path, change: Callable[[RunRecord], RunRecord]) -> None:
    path = folder / "run.json"
    path.write_text(change(read_record(path)).to_json())


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "interrupted": (lambda f: edited(f, lambda r: dataclasses.replace(r, complete=False)), "was interrupted; go on"),
    "another build": (
        lambda f: edited(f, lambda r: dataclasses.replace(r, identity=dataclasses.replace(r.identity, code="0" * 64))),  # type: ignore[type-var]
        "is about something else than",
    ),
    "no build": (lambda f: edited(f, lambda r: dataclasses.replace(r, identity=None)), "which build of kvcheck"),
    "contradiction": (
        lambda f: edited(f, lambda r: dataclasses.replace(r, verdict=Verdict.FAIL, exit_code=1)),
        "contradicts itself",
    ),
    "another plan": (lambda f: edited(f, lambda r: planned(r, answers_within=2)), "they differ in answers_within"),
    "another shard": (lambda f: edited(f, lambda r: planned(r, shard="1/3")), "both have .* with seed 1"),
    "a bad shard": (lambda f: edited(f, lambda r: planned(r, shard="4/3")), "--shard: expected I/N"),
    "bad seeds": (lambda f: edited(f, lambda r: planned(r, seeds="many")), "--seeds: expected"),
}


@pytest.mark.schedules
@pytest.mark.processes
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, three: list[Path], damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    change, says = DAMAGE[damage]
    copies = [Path(shutil.copytree(each, tmp_path / "runs" / each.name)) for each in three]
    change(copies[1])
    capsys.readouterr()
    assert run(["merge", *map(str, copies), "--out", str(tmp_path / "merged")]) == 2
    printed = capsys.readouterr()
    assert re.search(says, printed.err) and printed.out == "" and len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "merged").exists()


@pytest.mark.schedules
@pytest.mark.processes
def test_seeds_that_are_counted_already_are_refused_and_further_ones_add_up(
    tmp_path: Path, three: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    later = made(tmp_path / "later", [*WORDS, "--seeds", "3-4"], None)
    single = made(tmp_path / "single", [*STRESS, "--strategy", "answers:1", "--schedules", "1", "--seed", "5"], None)
    for pair, says in (
        ([three[0], three[0]], "is named twice"),
        ([three[2], later], "both have retract-resume/llama-3-micro with seed 3"),
        ([three[0]], "expected two or more runs, got 1"),
    ):
        capsys.readouterr()
        assert run(["merge", *map(str, pair), "--out", str(tmp_path / "merged")]) == 2
        assert says in capsys.readouterr().err
    folders = [*three[:2], later, single]
    found = read_record(made(tmp_path / "merged", ["merge", "--no-reports", *map(str, folders)], None))
    assert found.evidence.traces == sum(read_record(each).evidence.traces or 0 for each in folders)
    assert contradictions(found) == []
    assert {row.id: row.coverage.scope for row in found.scenarios if row.coverage is not None} == {
        "retract-resume/llama-3-micro": "every schedule within 1 answer of the eager order, of 5 workloads",
        "retract-resume/deepseek-v3-micro": "every schedule within 1 answer of the eager order, of 4 workloads",
    }


@pytest.mark.schedules
@pytest.mark.processes
def test_findings_of_shards_keep_lines_that_replay(tmp_path: Path) -> None:
    words = [*FAILING, "--seeds", "1-2", "--jobs", "1", "--no-reports"]
    shares = [made(tmp_path / f"{n}", [*words, "--shard", f"{n}/2"], None) for n in (1, 2)]
    found = merged(tmp_path / "merged", shares, 1)
    assert len(found.findings) == sum(len(read_record(each).findings) for each in shares) > 1
    assert [each.id for each in found.findings] == [f"{found.run_id}.{n}" for n in range(1, len(found.findings) + 1)]
    assert run(["replay", f"{found.run_id}#1", "--out", str(tmp_path / "merged")]) == 1


@pytest.mark.schedules
def test_runs_of_stress_with_other_seeds_are_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [made(tmp_path / f"{n}", [*STRESS, "--schedules", "3", "--seed", str(n)]) for n in (1, 2)]
    found = merged(tmp_path / "merged", runs)
    records = [read_record(each) for each in runs]
    assert found.evidence == records[0].evidence.plus(records[1].evidence)
    (row,) = found.scenarios
    assert row.schedules == 6 and row.coverage is not None and row.coverage.floor == 6
    assert contradictions(found) == []
    assert run(["gate", str(next((tmp_path / "merged").iterdir())), "--out", str(tmp_path / "merged")]) == 0
    same = made(tmp_path / "same", [*STRESS, "--schedules", "3", "--seed", "1"])
    other = made(tmp_path / "other", [*STRESS, "--schedules", "4", "--seed", "3"])
    for folder, says in (
        (same, "both have retract-resume/llama-3-micro with seed 1; expected each once"),
        (other, "is of another plan than"),
    ):
        capsys.readouterr()
        assert run(["merge", str(runs[0]), str(folder), "--out", str(tmp_path / "merged")]) == 2
        assert says in capsys.readouterr().err


def test_the_text_of_a_scope_is_read_as_it_is_written() -> None:
    for workloads in (1, 2, 1234):
        found = SCOPE.fullmatch(scope_text(workloads, within=2) or "")
        assert found is not None and int(found[2].replace(",", "")) == workloads
