"""`kvcheck campaign` from outside: verdicts, goes, shards, lines that failed, known findings, and wrong input."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from rigs.live_processes import children_of, poll

from kvcheck.commands.main import run
from kvcheck.core.base.causes import CALL
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.report.gate.contradictions import contradictions
from kvcheck.core.stress.campaign.ledger import LEDGER, read_ledger

ROOT = Path(__file__).parents[2]
CELLS = ["retract-resume", "--shape", "llama-3-micro", "--shape", "deepseek-v3-micro", "--requests", "3"]
SMALL = ["campaign", *CELLS, "--seeds", "2", "--workloads", "1", "--no-reports"]
MUTANT = ["campaign", "--mutant", "offload-skips-index-buffer", "--shape", "glm-5.1-micro", "--requests", "3"]
FAILING = [*MUTANT, "--seeds", "1", "--workloads", "3", "--jobs", "1", "--no-reports"]


def newest(out: Path) -> Path:
    """The folder of the last run."""
    return max(
        (path for path in out.iterdir() if (path / "run.json").is_file()),
        key=lambda path: (path / "run.json").stat().st_mtime,
    )


def without_time(record: RunRecord) -> object:
    """What a record says of what was judged."""
    rows = [dataclasses.replace(row, duration_s=0.0) for row in record.scenarios]
    findings = [dataclasses.replace(each, id="", cause=None, story=None) for each in record.findings]
    return rows, findings, record.verdict, record.exit_code, record.evidence, record.identity, record.complete


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], object]:
    """What a campaign of so many seeds says that one process ran at one go."""

    @cache
    def judged(seeds: int) -> object:
        out = tmp_path_factory.mktemp("whole")
        assert run([*SMALL, "--seeds", f"{seeds}", "--jobs", "1", "--out", str(out)]) == 0
        return without_time(read_record(newest(out)))

    return judged


@pytest.mark.schedules
@pytest.mark.processes
def test_one_process_and_two_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for jobs in ("1", "2"):
        assert run([*SMALL, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
        said.append(read_record(newest(tmp_path / jobs)))
    assert without_time(said[0]) == without_time(said[1])
    assert contradictions(said[0]) == [] and said[0].plan == said[1].plan
    for row in said[0].scenarios:
        assert row.coverage is not None
        assert row.coverage.scope == "every schedule within 1 answer of the eager order, of 2 workloads"
        assert row.evidence.traces == row.schedules > 10
    assert f"{said[0].evidence.traces} distinct traces" in capsys.readouterr().out


@pytest.mark.schedules
def test_it_stops_at_so_many_traces_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], whole: Callable[[int], object]
) -> None:
    words = [*SMALL, "--jobs", "1", "--out", str(tmp_path)]
    assert run([*words, "--traces", "1"]) == 4
    first = read_record(newest(tmp_path))
    assert first.complete and first.scenarios[1].verdict is Verdict.UNKNOWN
    assert first.scenarios[0].verdict is Verdict.PASS
    assert first.scenarios[0].coverage is not None
    assert "1 of 2 workloads" in first.scenarios[0].coverage.not_tried
    assert "--resume" in capsys.readouterr().out
    assert run([*words, "--resume"]) == 0
    assert "1 batch done" in capsys.readouterr().out
    assert without_time(read_record(newest(tmp_path))) == whole(2)


@pytest.mark.schedules
def test_a_torn_ledger_loses_one_batch_and_a_damaged_run_is_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "--jobs", "1", "--out", str(tmp_path)]
    assert run(words) == 0
    first = newest(tmp_path)
    ledger = first / LEDGER
    text = ledger.read_text()
    ledger.write_text(text[:-9])
    assert run([*words, "--resume"]) == 0
    captured = capsys.readouterr()
    assert "3 batches done" in captured.out and "was cut off; that batch runs again" in captured.err
    assert without_time(read_record(newest(tmp_path))) == without_time(read_record(first))
    for folder in tmp_path.iterdir():
        (folder / LEDGER).write_text("{}\n" + text)
    assert run([*words, "--resume"]) == 2
    captured = capsys.readouterr()
    assert "line 1: expected a batch of a campaign" in captured.err and "no campaign with this plan" in captured.err
    assert len([*tmp_path.iterdir()]) == 2, "what was refused left no folder"


@pytest.mark.schedules
def test_another_plan_or_another_build_is_not_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--jobs", "1", "--out", str(tmp_path)]
    assert run([*words, "--traces", "1"]) == 4
    assert run([*words, "--requests", "2", "--resume"]) == 2
    assert "no campaign with this plan" in capsys.readouterr().err
    path = newest(tmp_path) / "run.json"
    record = read_record(path)
    assert record.identity is not None
    other = dataclasses.replace(record, identity=dataclasses.replace(record.identity, code="0" * 64))
    path.write_text(other.to_json())
    assert run([*words, "--resume"]) == 2
    assert "is about something else: kvcheck's code was" in capsys.readouterr().err


@pytest.mark.schedules
@pytest.mark.processes
@pytest.mark.parametrize("who", ["parent", "worker"])
def test_a_kill_loses_nothing_that_had_ended(tmp_path: Path, who: str, whole: Callable[[int], object]) -> None:
    words = [*SMALL, "--seeds", "4", "--jobs", "2", "--out", str(tmp_path)]
    command = [sys.executable, "-m", "kvcheck", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        assert poll(lambda: any(path.stat().st_size for path in tmp_path.glob(f"*/{LEDGER}")), 120)
        victim = parent.pid if who == "parent" else children_of(parent.pid)[0]
        os.kill(victim, signal.SIGKILL)
        code = parent.wait(300)
    folder = newest(tmp_path)
    if who == "parent":
        assert code == -signal.SIGKILL and not read_record(folder).complete
        done, _ = read_ledger(folder / LEDGER)
        assert done and run([*words, "--resume"]) == 0
        kept, _ = read_ledger(newest(tmp_path) / LEDGER)
        assert kept[: len(done)] == done, "what had ended did not run again"
    else:
        assert code == 0, "the batch of the dead worker ran again"
    assert without_time(read_record(newest(tmp_path))) == whole(4)


@pytest.mark.schedules
@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_campaign_says_how_to_go_on(tmp_path: Path, number: signal.Signals) -> None:
    words = [*SMALL, "--seeds", "500", "--jobs", "2", "--out", str(tmp_path)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvcheck", *words], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as parent:
        assert poll(lambda: any(path.stat().st_size for path in tmp_path.glob(f"*/{LEDGER}")), 120)
        parent.send_signal(number)
        said, _ = parent.communicate(timeout=120)
    record = read_record(newest(tmp_path))
    assert parent.returncode == record.exit_code == 130 and not record.complete
    assert f" next   {record.repro} --resume" in said
    assert record.evidence.traces


@pytest.mark.schedules
def test_a_mutant_is_found_its_line_is_kept_and_runs_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path)]
    fixed = ["campaign", "retract-resume", *FAILING[3:]]
    assert run([*fixed, *out]) == 0
    assert not (tmp_path / "lines").exists()
    assert run([*FAILING, *out]) == 1
    record = read_record(newest(tmp_path))
    assert next(each.code for each in record.findings if each.cause is None) == "KV304"
    causes = [(each.code, each.buffer) for each in record.findings if each.cause is None and each.code != CALL]
    assert len(set(causes)) == len(causes), "each once a cell"
    kept = sorted((tmp_path / "lines").iterdir())
    assert kept and all(path.name.startswith("retract-resume.glm-5.1-micro-KV") for path in kept)
    capsys.readouterr()
    assert run(["replay", kept[0].read_text().strip()]) == 1
    assert run(["replay", f"{record.run_id}#1", *out]) == 1
    capsys.readouterr()
    assert run([*FAILING, *out]) == 1
    assert " STILL FAILS 1/1  retract-resume/glm-5.1-micro: KV304" in capsys.readouterr().out
    assert sorted((tmp_path / "lines").iterdir()) == kept, "what is there already is not written again"
    for path in kept:  # as after the fix: the same line of the fixed build
        path.write_text(path.read_text().replace("mutant=offload-skips-index-buffer,", ""))
    (tmp_path / "lines" / "bad.txt").write_text("nonsense\n")
    (tmp_path / "lines" / "two.txt").write_text("a\nb\n")
    (tmp_path / "lines" / "engine.txt").write_text("prefix-cache:shape=retract.nsa,target=sglang,seed=1,schedule=0\n")
    (tmp_path / "lines" / "other.txt").write_text("hicache:shape=llama-3-micro,seed=1,schedule=0\n")
    assert run([*fixed, *out]) == 0
    captured = capsys.readouterr()
    assert " FIXED  retract-resume/glm-5.1-micro: 1 of 1 run clean" in captured.out
    assert "1 line in " in captured.out and "of other cells or another mutant" in captured.out
    assert captured.err.count("is left out: ") == 3 and len(captured.err.strip().splitlines()) == 3


@pytest.mark.schedules
def test_known_findings_fail_nothing_until_they_expire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, known = ["--out", str(tmp_path)], tmp_path / "known.toml"
    assert run([*FAILING, *out]) == 1
    whose = ["--owner", "kv team", "--reason", "issue 7", "--expires", "2099-01-01"]
    assert run(["baseline", "save", newest(tmp_path).name, str(known), *whose, *out]) == 0
    capsys.readouterr()
    assert run([*FAILING, *out, "--baseline", str(known)]) == 0
    printed = capsys.readouterr().out
    assert " PASS  retract-resume/glm-5.1-micro" in printed and " exit 0" in printed
    assert " known    row 1: " in printed and "kv team, 2099-01-01: issue 7" in printed
    record = read_record(newest(tmp_path))
    assert record.verdict is Verdict.FAIL and record.findings, "the record has what is known too"
    assert contradictions(record) == []
    yesterday = datetime.datetime.now(datetime.UTC).date() - datetime.timedelta(days=1)
    known.write_text(known.read_text().replace("2099-01-01", yesterday.isoformat()))
    assert run([*FAILING, *out, "--baseline", str(known)]) == 1
    assert " expired  row 1: " in capsys.readouterr().out


@pytest.mark.schedules
def test_json_is_the_record_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, "--jobs", "1", "--traces", "1", "--format", "json", "--out", str(tmp_path)]
    assert run(words) == 4
    assert json.loads(capsys.readouterr().out)["run_id"] == newest(tmp_path).name


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--seeds", "9-5"], "--seeds: expected"),
        (["--shard", "3/2"], "--shard: expected I/N"),
        (["--answers-within", "-1"], "--answers-within -1: expected a number from 0 on"),
        (["--traces", "0"], "--traces: expected at least 1"),
        (["--workloads", "0"], "--workloads: expected at least 1"),
        (["--jobs", "0"], "--jobs: expected at least 1"),
        (["--max-time", "nan"], "--max-time: expected at least"),
        (["--requests", "0"], "--requests: expected at least 1"),
        (["--shape", "glm-9"], "glm-9"),
        (["--mutant", "nothing"], "nothing"),
        (["--baseline", "nowhere.toml"], "nowhere.toml"),
        (["--format", "xml"], "--format: expected one of"),
        (["--resume"], "--resume: no campaign with this plan under"),
        (["no-such-scenario"], "no-such-scenario"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert run(["campaign", "--out", str(tmp_path / "out"), *words]) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1
    assert not (tmp_path / "out").exists() or not [*(tmp_path / "out").iterdir()]
