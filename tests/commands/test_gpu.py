"""`make gpu`: what runs, what is left out and why, what an end means, what an interruption leaves. Without a GPU.

Invariants:
- Jobs are made up or run nothing, but for the two processes that show how a job is ended.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rigs.literal_record import FAILED

from kvcheck.commands import gpu
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import MutantResult, ScenarioResult, Verdict
from kvcheck.core.bench.gpu_jobs import (
    JOBS,
    SANITIZED,
    SANITIZER_FOUND,
    TOTAL_S,
    GpuJob,
    chosen_tests,
    command_of,
    jobs_on,
    judge_end,
    missing,
    summary_lines,
)
from kvcheck.core.report.store import write_run
from kvcheck.core.stress.coverage import settings_tried_by
from kvcheck.core.stress.runner_rows import row_of
from kvcheck.core.stress.schedule import PROCESS_RANKS, Plan

TESTS = Path(__file__).parents[1]
BY_NAME = {job.name: job for job in JOBS}
FACTS = {"device": "none, this is a test"}
PLAIN = GpuJob(name="plain", budget_s=9, arguments=("-c", "pass"), needs=())
XML = '<testsuites><testsuite tests="{}" skipped="{}" failures="0"/></testsuites>'


def has(*lacking: str) -> object:
    return lambda name: name not in lacking


def test_all_budgets_fit_and_names_are_told_apart() -> None:
    assert sum(job.budget_s for job in JOBS) <= TOTAL_S < 8 * 60 + 1
    assert len(BY_NAME) == len(JOBS)


def test_sanitized_tests_are_there_and_are_marked() -> None:
    assert all("mark.gpu" in (TESTS / "kernels" / name).read_text() for name in SANITIZED)
    assert "test_hold.py" not in SANITIZED


def test_what_a_part_lacks_is_named() -> None:
    assert missing(BY_NAME["stress"], has("triton"), None) == "not run: triton is missing"
    assert missing(BY_NAME["stress"], has(), None) is None
    lacking = missing(BY_NAME["memcheck"], has(), None)
    assert lacking == "not run: compute-sanitizer is neither on PATH nor in a CUDA toolkit"
    assert missing(BY_NAME["memcheck"], has(), "there") is None


def test_files_of_a_part_are_those_with_marks_that_can_be_imported() -> None:
    sources = {
        "tests/test_a.py": "@pytest.mark.gpu",
        "tests/test_b.py": "import hypothesis\n@pytest.mark.gpu",
        "tests/test_c.py": "",
        "tests/litmus/test_d.py": "@pytest.mark.gpu",
        "tests/rig.py": "mark.gpu",
    }
    assert chosen_tests(BY_NAME["kernels"], sources, has()) == (["tests/test_a.py", "tests/test_b.py"], None)
    kept, note = chosen_tests(BY_NAME["kernels"], sources, has("hypothesis"))
    assert kept == ["tests/test_a.py"] and note == "left out because hypothesis is missing: test_b.py"
    assert chosen_tests(BY_NAME["litmus"], sources, has()) == (["tests/litmus/test_d.py"], None)
    assert chosen_tests(BY_NAME["bench"], sources, has()) == ([], None)


def test_command_lines_are_whole() -> None:
    line = command_of(BY_NAME["memcheck"], ["tests/test_a.py"], python="python", out="there", tool="sanitizer")
    assert line[:6] == ("sanitizer", "--tool", "memcheck", "--error-exitcode", str(SANITIZER_FOUND), "python")
    assert line[-1] == "tests/test_a.py" and "--junitxml=there/memcheck.xml" in line
    for job, device in ((job, name) for name in ("cuda", "threads") for job in jobs_on(name)):
        line = command_of(job, [], python="python", out="there", tool=None)
        assert not any("{" in word for word in line)
        on_it = ("stress", "mutants", "bench", *(("ranks",) if device == "cuda" else ()))
        assert ("--device" in line) == (job.name in on_it)
        assert "--device" not in line or line[line.index("--device") + 1] == device


def test_ranks_share_memory_of_the_device_and_over_threads_that_of_the_host() -> None:
    def plan_of(device: str) -> Plan:
        (ranks,) = (job for job in jobs_on(device) if job.name == "ranks")
        line = command_of(ranks, [], python="python", out="there", tool=None)
        given = dict(itertools.pairwise(line))
        assert line[3:6] == ("stress", "nvlink-aux", "pd-transfer")
        return Plan(
            scenario="nvlink-aux",
            shape=given["--shape"],
            transport=given["--transport"],
            device=given.get("--device", "cpu"),
            backend="eager",
            ranks=PROCESS_RANKS,
            seed=int(given["--seed"]),
        )

    cuda, host = plan_of("cuda"), plan_of("threads")
    assert (cuda.transport, cuda.device, host) == ("ipc", "cuda", replace(cuda, device="cpu"))
    for plan in (cuda, host):
        row_of(plan).check(plan)
    assert "metadata path:async" in settings_tried_by(cuda), "bytes may land behind their status there alone"


def test_over_threads_all_jobs_run_but_the_sanitizers_of_a_device() -> None:
    assert [job.name for job in jobs_on("cuda")] == [job.name for job in JOBS]
    over_threads = [job.name for job in jobs_on("threads")]
    assert over_threads == [job.name for job in JOBS if job.name not in ("memcheck", "initcheck")]


def test_a_job_that_keeps_a_time_itself_has_begun_and_ended_before_it_is_asked_to() -> None:
    for job in (*jobs_on("cuda"), *jobs_on("threads")):
        words = job.arguments
        if "--max-time" in words:
            assert float(words[words.index("--max-time") + 1]) <= job.budget_s - gpu.GRACE_S - 4, job.name


@pytest.mark.processes
def test_the_options_of_every_part_exist(tmp_path: Path) -> None:
    """A word that a command does not know is exit 2; --help stops before anything else is looked at."""
    for job in jobs_on("cuda"):
        if job.tests is None:
            command = command_of(job, [], python=sys.executable, out=str(tmp_path), tool=None)
            assert subprocess.run([*command, "--help"], capture_output=True, timeout=60).returncode == 0, job.name
    command = command_of(
        BY_NAME["initcheck"], ["tests/kernels/test_hold.py"], python=sys.executable, out=str(tmp_path), tool=None
    )
    ran = subprocess.run([*command, "--collect-only"], cwd=gpu.ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "test_a_device_holds_like_the_host" in ran.stdout, ran.stdout


@pytest.mark.parametrize(
    ("name", "code", "report", "expected"),
    [
        ("stress", 0, None, (Verdict.PASS, None)),
        ("stress", 1, None, (Verdict.FAIL, "exit 1; see the log")),
        ("stress", 4, None, (Verdict.UNKNOWN, "exit 4; see the log")),
        ("stress", 70, None, (Verdict.UNKNOWN, "exit 70; see the log")),
        ("kernels", 0, (7, 2), (Verdict.PASS, "5 tests passed, 2 were skipped")),
        ("kernels", 0, (7, 7), (Verdict.UNKNOWN, "all 7 tests were skipped")),
        ("kernels", 1, (7, 2), (Verdict.FAIL, "tests failed; see the log")),
        ("kernels", 5, (0, 0), (Verdict.UNKNOWN, "the test runner ended with exit 5; see the log")),
        ("memcheck", SANITIZER_FOUND, (7, 2), (Verdict.FAIL, "memcheck found errors; see the log")),
        ("memcheck", 0, (7, 2), (Verdict.PASS, "5 tests passed, 2 were skipped")),
        ("bench", None, None, (Verdict.UNKNOWN, "asked to end after 37 s, to save what it had; that is there")),
        ("ranks", 4, None, (Verdict.UNKNOWN, "exit 4; see the log")),
    ],
)
def test_what_an_end_means(
    name: str, code: int | None, report: tuple[int, int] | None, expected: tuple[Verdict, str | None], tmp_path: Path
) -> None:
    if report is not None:
        (tmp_path / f"{name}.xml").write_text(XML.format(*report))
    assert judge_end(BY_NAME[name], code, tmp_path, asked_s=37.0) == expected


def test_a_report_that_is_not_there_is_no_pass(tmp_path: Path) -> None:
    assert judge_end(BY_NAME["litmus"], 0, tmp_path, asked_s=1.0)[0] is Verdict.UNKNOWN
    (tmp_path / "litmus.xml").write_text("<half")
    assert judge_end(BY_NAME["litmus"], 0, tmp_path, asked_s=1.0)[0] is Verdict.UNKNOWN


def test_mutants_findings_and_rates_of_a_record_are_told(tmp_path: Path) -> None:
    row = MutantResult(
        name="a-mutant",
        bug="b",
        killer="x",
        outcome="not-reproduced",
        schedules=3,
        verdict=Verdict.UNKNOWN,
        message="why",
    )
    write_run(replace(FAILED, mutants=(row,), warnings=("rates",)), tmp_path / "runs" / "mutants" / "one")
    lines = summary_lines(tmp_path, BY_NAME["mutants"])
    assert lines[0] == "a-mutant: not-reproduced, why" and lines[-1] == "rates"
    assert any(line.startswith(FAILED.findings[0].code) for line in lines)


def test_cells_that_never_ran_are_one_line(tmp_path: Path) -> None:
    def cell(name: str, schedules: int, reason: str) -> ScenarioResult:
        return ScenarioResult(id=name, shape="x", verdict=Verdict.UNKNOWN, reason=reason, schedules=schedules)

    late = [cell(f"hicache/{at}", 0, "its time was up") for at in range(3)]
    rows = (*FAILED.scenarios[:1], cell("hicache/short", 1, "1 of 9 ran"), *late)
    folder = tmp_path / "runs" / "stress" / "one"
    write_run(replace(FAILED, scenarios=rows), folder)
    lines = summary_lines(tmp_path, BY_NAME["stress"])
    assert "hicache/short: 1 of 9 ran" in lines and "3 of 5 cells never ran: its time was up" in lines
    assert not any("hicache/0" in line for line in lines)
    write_run(replace(FAILED, scenarios=(*rows, cell("hicache/cut", 0, "it was cut"))), folder)
    lines = summary_lines(tmp_path, BY_NAME["stress"])
    assert "4 of 6 cells never ran, 3 of them for this reason: its time was up" in lines


class Runner:
    """Gives back codes, one a job; KeyboardInterrupt for one that is "interrupt"."""

    def __init__(self, *codes: object) -> None:
        self.codes = list(codes)
        self.seen: list[Sequence[str]] = []
        self.asked_s: list[float] = []

    def __call__(self, command: Sequence[str], log: Path, variables: Mapping[str, str], asked_s: float) -> int | None:
        self.seen.append(command)
        self.asked_s.append(asked_s)
        code = self.codes.pop(0)
        if code == "interrupt":
            raise KeyboardInterrupt
        return code  # type: ignore[return-value]


def summary(out: Path) -> dict[str, object]:
    value: dict[str, object] = json.loads((out / "summary.json").read_text())
    return value


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 4), 1), ((0, 4), 4), ((0, None), 4), ((70, 0), 4)]
)
def test_the_worst_part_decides(codes: tuple[int | None, ...], expected: int, tmp_path: Path) -> None:
    jobs = (PLAIN, replace(PLAIN, name="second"))
    assert gpu.run_jobs(jobs, tmp_path, facts=FACTS, run=Runner(*codes)) == expected
    value = summary(tmp_path)
    assert value["complete"] is True and len(value["jobs"]) == 2  # type: ignore[arg-type]
    assert value["environment"] == FACTS
    assert f"verdict: {value['verdict']}" in (tmp_path / "summary.txt").read_text()


def test_an_interruption_keeps_what_was_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = tuple(replace(PLAIN, name=name) for name in ("one", "two", "three"))
    assert gpu.run_jobs(jobs, tmp_path, facts=FACTS, run=Runner(0, "interrupt")) == 130
    value = summary(tmp_path)
    assert value["complete"] is False and value["verdict"] == "unknown"
    assert [row["name"] for row in value["jobs"]] == ["one"]  # type: ignore[union-attr,index]
    assert "not complete" in (tmp_path / "summary.txt").read_text()
    assert "after 1 of 3 jobs" in capsys.readouterr().err


def test_a_part_that_cannot_run_is_unknown_and_starts_nothing(tmp_path: Path) -> None:
    runner = Runner()
    lacking = replace(PLAIN, needs=("no_such_module",))
    assert gpu.run_jobs((lacking,), tmp_path, facts=FACTS, run=runner) == 4
    assert not runner.seen
    assert "not run: no_such_module is missing" in (tmp_path / "summary.txt").read_text()


def test_time_that_is_over_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "TOTAL_S", gpu.GRACE_S - 1)
    assert gpu.run_jobs((PLAIN,), tmp_path, facts=FACTS, run=Runner()) == 4
    assert "not run: 7 s of the 7 s of all jobs were left" in (tmp_path / "summary.txt").read_text()


@pytest.mark.parametrize(("total_s", "asked_s"), [(480, 37), (30, 22), (8.5, 1)])
def test_a_job_is_asked_to_end_before_its_time_and_that_of_all_is_over(
    total_s: float, asked_s: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TOTAL_S", total_s)
    runner = Runner(None)
    assert gpu.run_jobs((replace(PLAIN, budget_s=45),), tmp_path, facts=FACTS, run=runner) == 4
    assert [round(seconds) for seconds in runner.asked_s] == [asked_s]
    assert f"of 45  asked to end after {asked_s} s, to save what it had" in (tmp_path / "summary.txt").read_text()


def archived(out: Path) -> dict[str, str]:
    """The files of the archive, by name."""
    with tarfile.open(out / gpu.ARCHIVE) as stream:
        return {each.name: stream.extractfile(each).read().decode() for each in stream}  # type: ignore[union-attr]


def test_three_files_hold_everything_after_each_job(tmp_path: Path) -> None:
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    seen: list[set[str]] = []

    def run(command: Sequence[str], log: Path, variables: Mapping[str, str], asked_s: float) -> int:
        seen.append(set(archived(out)))
        log.parent.joinpath("runs", "one").mkdir(parents=True, exist_ok=True)
        log.write_text(f"of {log.stem}")
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        return 0

    work.mkdir()
    jobs = (PLAIN, replace(PLAIN, name="second"))
    assert gpu.run_jobs(jobs, out, facts=FACTS, run=run, work=work) == 0
    assert sorted(path.name for path in out.iterdir()) == ["gpu.tar.gz", "summary.json", "summary.txt"]
    assert seen == [set(), {"gpu/plain.log"}]
    assert archived(out) == {"gpu/plain.log": "of plain", "gpu/second.log": "of second"}


def test_an_archive_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / gpu.ARCHIVE).mkdir()
    with pytest.raises(UsageError, match="expected a folder that can be written: name one with OUT=DIR"):
        gpu.run_jobs((PLAIN,), tmp_path, facts=FACTS, run=Runner(0))


def test_a_sanitizer_that_does_not_work_here_judges_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "sanitizer_path", lambda: "compute-sanitizer")
    runner = Runner(1)
    assert gpu.run_jobs((BY_NAME["initcheck"],), tmp_path, facts=FACTS, run=runner) == 4
    (probe,) = runner.seen
    assert probe[:3] == ["compute-sanitizer", "--tool", "initcheck"] and probe[-1] == gpu.TOUCH
    assert "initcheck does not work on this machine" in (tmp_path / "summary.txt").read_text()
    runner = Runner(0, SANITIZER_FOUND)
    assert gpu.run_jobs((BY_NAME["initcheck"],), tmp_path, facts=FACTS, run=runner) == 1
    assert "not torch" in runner.seen[1] and "not torch" not in command_of(
        BY_NAME["memcheck"], [], python="python", out="there", tool="there"
    )


def test_a_device_that_is_none_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DEVICE", "tpu")
    assert gpu.main() == 2
    assert capsys.readouterr().err == "kvcheck gpu: DEVICE: expected cuda or threads, got 'tpu'\n"


@pytest.mark.parametrize("inside", ["", "x"])
def test_a_folder_that_cannot_be_written_is_named_as_the_user_named_it(
    inside: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("DEVICE", "threads")
    monkeypatch.setenv("OUT", str(file / inside))
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    assert gpu.main() == 2
    told = capsys.readouterr().err
    assert told.startswith(f"kvcheck gpu: cannot write {file / inside}: ") and told.count("\n") == 1
    assert "expected a folder that can be written: name one with OUT=DIR" in told and "--out" not in told


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_names_what_the_environment_says_and_runs_nothing(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "run_jobs", None)
    assert gpu.main([word]) == 0
    told = capsys.readouterr().out
    assert all(name in told for name in ("OUT=DIR", "DEVICE=NAME", "PYTHON=NAME", "CUDA_HOME", *BY_NAME))


@pytest.mark.parametrize("words", [["--device", "threads"], ["stress"], ["--help", "stress"]])
def test_an_argument_is_one_line_and_exit_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(words) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert told.err.startswith(f"kvcheck gpu: expected no arguments, got '{' '.join(words)}'; ")


@pytest.mark.processes
def test_over_threads_the_jobs_are_judged_and_their_records_are_in_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shorter(name: str, *more: str) -> GpuJob:
        words = BY_NAME[name].over_threads
        assert words is not None
        return replace(BY_NAME[name], over_threads=(*words[:3], *more, *words[3:]))

    jobs = (shorter("stress", "hicache"), shorter("mutants"), BY_NAME["initcheck"])
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("DEVICE", "threads")
    monkeypatch.setattr(gpu, "JOBS", jobs)
    monkeypatch.setattr(gpu, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu, "sanitizer_path", lambda: None)
    assert gpu.main() == 0
    rows = {row["name"]: row for row in summary(out)["jobs"]}  # type: ignore[union-attr,index]
    assert {name: row["verdict"] for name, row in rows.items()} == {"stress": "pass", "mutants": "pass"}, rows
    assert summary(out)["environment"]["left out"].startswith("initcheck: ")  # type: ignore[index,call-overload]
    assert "wrong bytes in" in str(rows["mutants"]["lines"])
    records = {name: json.loads(text) for name, text in archived(out).items() if name.endswith("/run.json")}
    assert len(records) == 2
    assert all("--device threads" in " ".join(each["argv"]) for each in records.values())


@pytest.mark.processes
def test_a_process_is_run_and_ended_when_its_time_is_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    says = "import os; print(os.environ['MORE'], os.environ['PYTHONPATH'].split(os.pathsep)[0])"
    assert gpu.run_process([sys.executable, "-c", says + "; raise SystemExit(3)"], log, {"MORE": "more"}, 60) == 3
    assert log.read_text().split() == ["more", str(gpu.ROOT)]
    stays = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    assert gpu.run_process([sys.executable, "-c", stays], log, {}, 1.0) is None
    with pytest.raises(ProcessLookupError):
        os.kill(int(log.read_text()), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_one_line_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu.main() == 4
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("\n") == 1
    assert "needs a CUDA device" in told.err and not (tmp_path / "out").exists()
