"""`make gpu`, or `PYTHONPATH=. python -m tools.gpu`: run everything that needs a GPU, in under eight minutes.

It takes no arguments, installs nothing and uses no network. Variables of the environment say what it does:

    OUT=DIR       where summary.txt, summary.json and gpu.tar.gz are written; otherwise build/gpu
    DEVICE=NAME   cuda, or threads, which stand in for a GPU: every job runs and ends, and nothing of a GPU is shown
    PYTHON=NAME   of make gpu: the interpreter, used as it is; otherwise python3
    PYTHONPATH    further folders to import from, behind this tree
    CUDA_HOME     the toolkit whose compute-sanitizer is taken if none is on PATH; otherwise /usr/local/cuda

The archive has a log for each job and the records of runs.

Invariants:
- All three files are rewritten after every job, whole or not at all, so that an interrupted run keeps its results.
- Exit 0 when every job passed, 1 when one failed, 4 when one has no verdict or there is no GPU, 130 when interrupted.
- A job that did not run, ran out of time, or ran no test is UNKNOWN with the reason, never a pass.
- Each job is a process group of its own, which is ended when its time is up.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from kvcheck.core.base.cells import CONNECTIONS, STREAMED
from kvcheck.core.base.child import has_ended, kill_group
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Verdict, read_record, to_plain
from kvcheck.core.run.store import make_folder, replacing, write_text
from tools.gpu.jobs import JOBS, TOTAL_S, GpuJob

ROOT = Path(__file__).parents[2]
ARCHIVE = "gpu.tar.gz"
GRACE_S = 8
"""Seconds between asking a job to end, when it saves what it has, and ending it."""
SANITIZER, SANITIZER_FOUND = "compute-sanitizer", 99
"""The tool, and what it is told to exit with where it found something; no test runner does."""
TOUCH, PROBE_S = "import torch; torch.ones(8, device='cuda').sum().item()", 60
"""What a sanitizer is tried on before it judges, and for how long: some machines refuse it."""
TOLD = 10
"""Findings of a job, and cells without a verdict, that the summary has at most."""
ELSEWHERE = "name one with OUT=DIR"

Run = Callable[[Sequence[str], Path, Mapping[str, str], float], int | None]
"""Runs a command line, its output into a file, with variables, and asks it to end after so many seconds: its exit code,
None if it was asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJobResult:
    """What became of a job. exit_code: of its process, None where there was none. lines: for the summary."""

    name: str
    verdict: Verdict
    budget_s: int
    reason: str | None = None
    exit_code: int | None = None
    duration_s: float = 0.0
    command: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.verdict.value:<8} {self.name:<10} {self.duration_s:6.1f} s of {self.budget_s}"
        return f"{text}  {self.reason}" if self.reason else text


def main(words: Sequence[str] = ()) -> int:
    text = f"{__doc__}\nJobs: {', '.join(job.name for job in JOBS)}."
    shown = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(prog="tools.gpu", description=text, formatter_class=shown).parse_args(words)
    device = os.environ.get("DEVICE") or "cuda"
    try:
        if device not in STREAMED:
            raise UsageError(f"DEVICE: expected {' or '.join(sorted(STREAMED))}, got {device!r}")
        facts = surroundings(device)
        if isinstance(facts, str):
            sys.stderr.write(f"kvcheck gpu: {facts}; nothing was run (exit 4)\n")
            return Verdict.UNKNOWN.exit_code
        out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu").resolve()
        make_folder(out, elsewhere=ELSEWHERE)
        signal.signal(signal.SIGTERM, _interrupt)
        jobs = [job for job in JOBS if job.tool is None or device != "threads"]
        with TemporaryDirectory(prefix="kvcheck-gpu-") as work:  # one of its own, so that two runs do not meet
            return run_jobs(jobs, out, Path(work), device=device, facts=facts, run=run_process)
    except UsageError as error:
        sys.stderr.write(f"kvcheck gpu: {error}\n")
        return error.exit_code


def run_jobs(
    jobs: Sequence[GpuJob], out: Path, work: Path, *, device: str, facts: Mapping[str, object], run: Run
) -> int:
    began = time.monotonic()
    results: list[GpuJobResult] = []
    _save(out, work, facts, results, complete=False)
    try:
        for job in jobs:
            left_s = TOTAL_S - (time.monotonic() - began)
            results.append(_run_job(job, work, device=device, left_s=left_s, run=run))
            sys.stdout.write(f"{results[-1]}\n")
            sys.stdout.flush()
            _save(out, work, facts, results, complete=False)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvcheck gpu: interrupted after {len(results)} of {len(jobs)} jobs; see {out}\n")
        return 130
    _save(out, work, facts, results, complete=True)
    verdict = Verdict.worst(result.verdict for result in results)
    sys.stdout.write(f"{verdict.value}  {out / 'summary.txt'}  exit {verdict.exit_code}\n")
    return verdict.exit_code


def _run_job(job: GpuJob, work: Path, *, device: str, left_s: float, run: Run) -> GpuJobResult:
    command = command_of(job, device, out=work)
    reason = missing(job)
    if reason is None and left_s <= GRACE_S:
        reason = f"{max(0.0, left_s):.0f} s of the {TOTAL_S} s of all jobs were left"
    began = time.monotonic()
    variables = dict(CONNECTIONS)
    if reason is None and job.tool is not None:
        variables["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # every tensor is an allocation that the tool knows
        probe = (*under(job), sys.executable, "-c", TOUCH)
        if (code := run(probe, work / f"{job.name}-probe.log", variables, _asked_s(PROBE_S, left_s))) != 0:
            reason = f"{job.tool} does not work on this machine: one small tensor ended with {code}"
    if reason is not None:
        return GpuJobResult(name=job.name, verdict=Verdict.UNKNOWN, reason=f"not run: {reason}", budget_s=job.budget_s)
    asked_s = _asked_s(job.budget_s, left_s - (time.monotonic() - began))
    code = run(command, work / f"{job.name}.log", variables, asked_s)
    verdict, reason = judge_end(job, code, work / f"{job.name}.xml", asked_s=asked_s)
    return GpuJobResult(
        name=job.name,
        verdict=verdict,
        reason=reason,
        exit_code=code,
        duration_s=round(time.monotonic() - began, 1),
        budget_s=job.budget_s,
        command=command,
        lines=tuple(line for path in sorted((work / "runs" / job.name).glob("*/run.json")) for line in told(path)),
    )


def _asked_s(budget_s: float, left_s: float) -> float:
    """Seconds after which a job is asked to end, so that it has ended within its budget and what is left for all."""
    return max(1.0, min(budget_s, left_s) - GRACE_S)


def sanitizer_path() -> str | None:
    homes = [Path(home) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home]
    beside = os.pathsep.join(str(home / folder) for home in homes for folder in ("bin", "compute-sanitizer"))
    return shutil.which(SANITIZER) or shutil.which(SANITIZER, path=beside)


def under(job: GpuJob) -> tuple[str, ...]:
    path = sanitizer_path()
    return (path, "--tool", job.tool, "--error-exitcode", str(SANITIZER_FOUND)) if job.tool and path else ()


def missing(job: GpuJob) -> str | None:
    if lacking := [name for name in job.needs if not _has(name)]:
        return f"{', '.join(lacking)} is missing"
    if job.tool is not None and not under(job):
        return f"{SANITIZER} is neither on PATH nor in a CUDA toolkit"
    return None


def command_of(job: GpuJob, device: str, *, out: Path) -> tuple[str, ...]:
    words: list[str] = []
    for word in shlex.split(job.over_threads or job.words if device == "threads" else job.words):
        words += chosen_tests(job) if word == "{tests}" else [word.format(out=out, name=job.name)]
    return (*under(job), sys.executable, *words)


def chosen_tests(job: GpuJob) -> list[str]:
    """The test files of a job. With the marker gpu, those with marked tests. None that imports what is missing."""
    chosen = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
        is_marked = "-m gpu" not in job.words or "mark.gpu" in text
        if job.tests is not None and job.tests(name) and is_marked and ("hypothesis" not in text or _has("hypothesis")):
            chosen.append(name)
    return chosen


def run_process(command: Sequence[str], log: Path, variables: Mapping[str, str], asked_s: float) -> int | None:
    """Run a job as a process group. After its time it gets SIGTERM, and what is left of it GRACE_S later is killed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as out:
        child = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True, text=True
        )
        is_over = False
        try:
            is_over = has_ended(child, asked_s)
        finally:
            if not is_over:
                os.killpg(child.pid, signal.SIGTERM)
                has_ended(child, GRACE_S)
            code = kill_group(child)
    return code if is_over else None


def judge_end(job: GpuJob, exit_code: int | None, report: Path, *, asked_s: float) -> tuple[Verdict, str | None]:
    """The result of a job that has ended. exit_code: None if it was asked to end, which was after so many seconds.

    report: of the tests that it ran. A run in which every test was skipped ends with 0, and is no pass.
    """
    if exit_code is None:
        return Verdict.UNKNOWN, f"asked to end after {asked_s:.0f} s, to save what it had; that is there"
    if job.tool is not None and exit_code == SANITIZER_FOUND:
        return Verdict.FAIL, f"{job.tool} found errors; see the log"
    if exit_code:
        return Verdict.FAIL if exit_code == 1 else Verdict.UNKNOWN, f"exit {exit_code}; see the log"
    if job.tests is None:
        return Verdict.PASS, None
    try:
        suites = [*ElementTree.parse(report).getroot().iter("testsuite")]
        tests, skipped = (sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped"))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        return Verdict.UNKNOWN, f"the test runner left no report: {error}"
    if tests == skipped:
        return Verdict.UNKNOWN, f"all {tests} tests were skipped"
    return Verdict.PASS, f"{tests - skipped} tests passed, {skipped} were skipped"


def told(path: Path) -> list[str]:
    """What the summary has of a record: mutants, findings, cells without a verdict, and warnings, such as the rates."""
    try:
        record = read_record(path)
    except UsageError as error:
        return [f"no record: {error}"]
    mutants = [f"{row.name}: {row.outcome}, {row.message or 'no message'}" for row in record.mutants]
    found = [f"{finding.code} {finding.message}" for finding in record.findings]
    unknown = [f"{row.id}: {row.reason}" for row in record.scenarios if row.verdict is Verdict.UNKNOWN]
    return [*mutants, *found[:TOLD], *unknown[:TOLD], *record.warnings]


def _save(out: Path, work: Path, facts: Mapping[str, object], results: list[GpuJobResult], *, complete: bool) -> None:
    """Both summaries, and the archive of all that the jobs have written. Raises UsageError if one cannot be written."""
    verdict = Verdict.worst(result.verdict for result in results) if complete else Verdict.UNKNOWN
    whole = {
        "complete": complete,
        "verdict": verdict.value,
        "environment": dict(facts),
        "jobs": to_plain(tuple(results)),
    }
    write_text(out / "summary.json", json.dumps(whole, indent=1) + "\n", elsewhere=ELSEWHERE)
    lines = [*(f"{name}: {value}" for name, value in facts.items()), ""]
    for result in results:
        lines += [str(result), *(f"    {line}" for line in result.lines)]
    lines += ["", f"verdict: {verdict.value}" if complete else "not complete"]
    write_text(out / "summary.txt", "\n".join(lines) + "\n", elsewhere=ELSEWHERE)
    with replacing(out / ARCHIVE, elsewhere=ELSEWHERE) as draft, tarfile.open(draft, "w:gz", compresslevel=3) as stream:
        for path in sorted(each for each in work.rglob("*") if each.is_file()):
            stream.add(path, arcname=str(Path("gpu") / path.relative_to(work)), recursive=False)


def surroundings(device: str) -> dict[str, object] | str:
    if not _has("torch"):
        return "needs torch, and this interpreter has none"
    import torch

    facts: dict[str, object] = {"device": "threads of this machine, which say nothing of a GPU: no sanitizer is run"}
    if device == "cuda":
        if not torch.cuda.is_available():
            return f"needs a CUDA device; torch {torch.__version__} sees none"
        seen = torch.cuda.get_device_properties(0)
        facts = {"device": seen.name, "memory_bytes": seen.total_memory, "capability": f"{seen.major}.{seen.minor}"}
    packages = ("triton", "typer", "pytest", "hypothesis", "pandas", "matplotlib", "jinja2")
    lacking = ", ".join(name for name in packages if not _has(name))
    libraries = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    return {**facts, **libraries, "missing": lacking or "nothing"}


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
