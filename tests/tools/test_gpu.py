"""`make gpu`: what runs, what is left out and why, what an end means, what an interruption leaves. Without a GPU."""

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
from typing import Any

import pytest
import torch

from kvcheck.core.base.record import Verdict
from kvcheck.core.run.plan import PROCESS_RANKS, Plan
from kvcheck.core.run.runners import row_of
from kvcheck.core.stress.rows import settings_tried_by
from tools.gpu import __main__ as gpu
from tools.gpu.jobs import JOBS, SANITIZED, TOTAL_S, GpuJob

BY_NAME = {job.name: job for job in JOBS}
DEVICES = ("cuda", "threads")
FACTS = {"device": "none, this is a test"}
PLAIN = GpuJob(name="plain", budget_s=9, words="-c pass", needs=())
XML = '<testsuites><testsuite tests="{}" skipped="{}" failures="0"/></testsuites>'


def lacking(monkeypatch: pytest.MonkeyPatch, *modules: str, sanitizer: str | None = None) -> None:
    """This machine has every other module, and a sanitizer there."""
    monkeypatch.setattr(gpu, "_has", lambda name: name not in modules)
    monkeypatch.setattr(gpu, "sanitizer_path", lambda: sanitizer)


def test_all_budgets_fit_and_sanitized_tests_are_there_and_are_marked() -> None:
    assert sum(job.budget_s for job in JOBS) <= TOTAL_S <= 8 * 60 and len(BY_NAME) == len(JOBS)
    assert sorted(Path(path).name for path in gpu.chosen_tests(BY_NAME["memcheck"])) == sorted(SANITIZED)


def test_files_of_a_job_are_those_with_marks_that_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {
        "test_a.py": "@pytest.mark.gpu",
        "test_b.py": "import hypothesis\n@pytest.mark.gpu",
        "test_c.py": "",
        "litmus/test_d.py": "",
        "rig.py": "mark.gpu",
    }
    for name, text in texts.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text(text)
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    lacking(monkeypatch)
    assert gpu.chosen_tests(BY_NAME["kernels"]) == ["tests/test_a.py", "tests/test_b.py"]
    assert gpu.chosen_tests(BY_NAME["litmus"]) == ["tests/litmus/test_d.py"]
    assert gpu.chosen_tests(BY_NAME["bench"]) == []
    lacking(monkeypatch, "hypothesis")
    assert gpu.chosen_tests(BY_NAME["kernels"]) == ["tests/test_a.py"]


def test_ranks_share_memory_of_the_device_and_over_threads_that_of_the_host() -> None:
    def plan_of(device: str) -> Plan:
        line = gpu.command_of(BY_NAME["ranks"], device, out=Path("there"))
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

    cuda, host = map(plan_of, DEVICES)
    assert (cuda.transport, cuda.device, host) == ("ipc", "cuda", replace(cuda, device="cpu"))
    for plan in (cuda, host):
        row_of(plan).check(plan)
    assert "metadata path:async" in settings_tried_by(cuda), "bytes may land behind their status there alone"


@pytest.mark.processes
def test_the_options_of_every_job_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that a command does not know is exit 2; --help stops before anything else is looked at."""
    lacking(monkeypatch)
    for job in JOBS:
        if job.tests is None:
            command = gpu.command_of(job, "cuda", out=tmp_path)
            assert subprocess.run([*command, "--help"], capture_output=True, timeout=60).returncode == 0, job.name
    command = gpu.command_of(BY_NAME["initcheck"], "cuda", out=tmp_path)
    ran = subprocess.run([*command, "--collect-only"], cwd=gpu.ROOT, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "[device]" in ran.stdout, ran.stdout


@pytest.mark.parametrize(
    ("name", "code", "report", "verdict", "told"),
    [
        ("stress", 0, "", Verdict.PASS, "None"),
        ("stress", 1, "", Verdict.FAIL, "exit 1"),
        ("stress", 4, "", Verdict.UNKNOWN, "exit 4"),
        ("kernels", 0, XML.format(7, 2), Verdict.PASS, "5 tests passed, 2 "),
        ("kernels", 0, XML.format(7, 7), Verdict.UNKNOWN, "all 7 "),
        ("kernels", 1, XML.format(7, 2), Verdict.FAIL, "exit 1"),
        ("kernels", 5, XML.format(0, 0), Verdict.UNKNOWN, "exit 5"),
        ("litmus", 0, "<half", Verdict.UNKNOWN, "no report"),
        ("memcheck", gpu.SANITIZER_FOUND, XML.format(7, 2), Verdict.FAIL, "memcheck"),
        ("memcheck", 0, XML.format(7, 2), Verdict.PASS, "5 tests passed"),
        ("bench", None, "", Verdict.UNKNOWN, "after 37 s"),
    ],
)
def test_what_an_end_means(
    name: str, code: int | None, report: str, verdict: Verdict, told: str, tmp_path: Path
) -> None:
    if report:
        (tmp_path / "report.xml").write_text(report)
    ended = gpu.judge_end(BY_NAME[name], code, tmp_path / "report.xml", asked_s=37.0)
    assert ended[0] is verdict and told in str(ended[1])


class Runner:
    """Gives back codes, one a process; KeyboardInterrupt for one that is "interrupt"."""

    def __init__(self, *codes: object) -> None:
        self.codes = list(codes)
        self.seen: list[Sequence[str]] = []
        self.asked_s: list[float] = []

    def __call__(self, command: Sequence[str], log: Path, variables: Mapping[str, str], asked_s: float) -> int | None:
        assert variables["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
        self.seen.append(command)
        self.asked_s.append(asked_s)
        code = self.codes.pop(0)
        if code == "interrupt":
            raise KeyboardInterrupt
        log.write_text(f"of {log.stem}")
        return code  # type: ignore[return-value]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A folder of results beside that of the jobs."""
    for name in ("out", "work"):
        (tmp_path / name).mkdir()
    return tmp_path / "out"


def run_jobs(jobs: Sequence[GpuJob], out: Path, runner: gpu.Run) -> int:
    return gpu.run_jobs(jobs, out, out.parent / "work", device="cuda", facts=FACTS, run=runner)


def summary(out: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return value


@pytest.mark.parametrize(
    ("codes", "expected"), [((0, 0), 0), ((0, 1), 1), ((1, 4), 1), ((0, 4), 4), ((0, None), 4), ((70, 0), 4)]
)
def test_the_worst_job_decides(codes: tuple[int | None, ...], expected: int, out: Path) -> None:
    assert run_jobs((PLAIN, replace(PLAIN, name="second")), out, Runner(*codes)) == expected
    value = summary(out)
    assert value["complete"] is True and len(value["jobs"]) == 2 and value["environment"] == FACTS


def test_an_interruption_keeps_what_was_done(out: Path) -> None:
    jobs = tuple(replace(PLAIN, name=name) for name in ("one", "two", "three"))
    assert run_jobs(jobs, out, Runner(0, "interrupt")) == 130
    value = summary(out)
    assert value["complete"] is False and value["verdict"] == "unknown"
    assert [row["name"] for row in value["jobs"]] == ["one"]
    assert archived(out) == {"gpu/one.log": "of one"}


@pytest.mark.parametrize(("needs", "total_s"), [(("no_such_module",), gpu.TOTAL_S), ((), gpu.GRACE_S - 1)])
def test_a_job_that_cannot_run_or_has_no_time_is_unknown_and_starts_nothing(
    needs: tuple[str, ...], total_s: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TOTAL_S", total_s)
    runner = Runner()
    assert run_jobs((replace(PLAIN, needs=needs),), out, runner) == 4
    assert not runner.seen
    assert ("no_such_module" if needs else "7 s of all jobs") in (out / "summary.txt").read_text()


@pytest.mark.parametrize(("total_s", "asked_s"), [(480, 37), (30, 22), (8.5, 1)])
def test_a_job_is_asked_to_end_before_its_time_and_that_of_all_is_over(
    total_s: float, asked_s: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "TOTAL_S", total_s)
    runner = Runner(None)
    assert run_jobs((replace(PLAIN, budget_s=45),), out, runner) == 4
    assert [round(seconds) for seconds in runner.asked_s] == [asked_s]


def archived(out: Path) -> dict[str, str]:
    with tarfile.open(out / gpu.ARCHIVE) as stream:
        return {each.name: stream.extractfile(each).read().decode() for each in stream}  # type: ignore[union-attr]


def test_a_sanitizer_that_does_not_work_here_judges_nothing(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking(monkeypatch, sanitizer="compute-sanitizer")
    runner = Runner(1)
    assert run_jobs((BY_NAME["initcheck"],), out, runner) == 4
    (probe,) = runner.seen
    assert probe[:3] == ("compute-sanitizer", "--tool", "initcheck") and probe[-1] == gpu.TOUCH
    assert "initcheck does not work on this machine" in (out / "summary.txt").read_text()
    assert run_jobs((BY_NAME["initcheck"],), out, Runner(0, gpu.SANITIZER_FOUND)) == 1


@pytest.mark.processes
def test_over_threads_the_jobs_are_judged_and_their_records_are_in_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stress = replace(BY_NAME["stress"], over_threads=f"{BY_NAME['stress'].over_threads} hicache")
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    monkeypatch.setenv("DEVICE", "threads")
    monkeypatch.setattr(gpu, "JOBS", (stress, BY_NAME["mutants"], BY_NAME["initcheck"]))
    assert gpu.main() == 0
    rows = {row["name"]: row for row in summary(out)["jobs"]}
    assert {name: row["verdict"] for name, row in rows.items()} == {"stress": "pass", "mutants": "pass"}, rows
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
def test_without_a_gpu_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert gpu.main() == 4
    assert "needs a CUDA device" in capsys.readouterr().err and not (tmp_path / "out").exists()
