"""`make gpu`: run everything that needs a GPU in under eight minutes, and write the results to files.

It imports only torch, installs nothing and uses no network. With DEVICE=threads, threads stand in for the device: this
shows that every job runs and ends, and nothing of a GPU. Three files are written to $OUT, or to build/gpu:
summary.txt, summary.json, and gpu.tar.gz with a log for each job and the records of runs. These lie in a folder of the
run's own below build/gpu-jobs, so that two runs do not meet; those of runs that have ended are taken away.

Invariants:
- All three files are rewritten after every job, whole or not at all, so that an interrupted run keeps its results.
- Exit 0 when every job passed, 1 when one failed, 4 when one has no verdict or there is no GPU, 130 when interrupted.
- Each job is a process group of its own, which is ended when its time is up.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kvcheck
from kvcheck.commands.sanitizer import PROBE_S, TOUCH, sanitizer_path, under
from kvcheck.core.base.child import has_ended, kill_group
from kvcheck.core.base.devices import CONNECTIONS, STREAMED
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Verdict, to_plain
from kvcheck.core.bench.gpu_jobs import (
    JOBS,
    SANITIZER,
    TOTAL_S,
    GpuJob,
    GpuJobResult,
    chosen_tests,
    command_of,
    jobs_on,
    judge_end,
    missing,
    summary_lines,
)
from kvcheck.core.report.store import make_folder, replacing, write_text

ROOT = Path(kvcheck.__file__).parents[1]
WORK = ROOT / "build" / "gpu-jobs"
ARCHIVE = "gpu.tar.gz"
GRACE_S = 8
"""Seconds between asking a job to end, when it saves what it has, and ending it."""
ELSEWHERE = "name one with OUT=DIR"

INTERRUPTED = 130

HELP = f"""\
make gpu, or python -m kvcheck.commands.gpu: runs everything that needs a GPU, within {TOTAL_S} s.
It takes no arguments. Variables of the environment say what it does:

  OUT=DIR        where summary.txt, summary.json and {ARCHIVE} are written; default: build/gpu of this tree
  DEVICE=NAME    cuda, or threads, which stand in for a GPU; default: cuda
  PYTHON=NAME    of make gpu: the interpreter, used as it is; default: python3
  PYTHONPATH     further folders to import from, behind this tree
  CUDA_HOME      the toolkit whose {SANITIZER} is taken if none is on PATH; default: /usr/local/cuda

Jobs: {", ".join(job.name for job in JOBS)}.
Exit 0: every job passed; 1: one failed; 4: one has no verdict, or there is no GPU; 2: it was called wrongly;
{INTERRUPTED}: it was interrupted.
"""


def main(words: Sequence[str] = ()) -> int:
    """Run every job; the exit code. words: behind the name of the module."""
    if words and {*words} <= {"--help", "-h"}:
        sys.stdout.write(HELP)
        return 0
    if words:
        sys.stderr.write(
            f"kvcheck gpu: expected no arguments, got {' '.join(words)!r}; variables of the environment say what it "
            "does; next: python -m kvcheck.commands.gpu --help\n"
        )
        return UsageError.exit_code
    named = os.environ.get("DEVICE") or "cuda"
    if named not in STREAMED:
        sys.stderr.write(f"kvcheck gpu: DEVICE: expected {' or '.join(sorted(STREAMED))}, got {named!r}\n")
        return UsageError.exit_code
    facts = _device() if named == "cuda" else _of_threads()
    if isinstance(facts, str):
        sys.stderr.write(f"kvcheck gpu: {facts}; nothing was run (exit 4)\n")
        return Verdict.UNKNOWN.exit_code
    out = Path(os.environ.get("OUT") or ROOT / "build" / "gpu").resolve()
    signal.signal(signal.SIGTERM, _end)
    try:
        make_folder(out, elsewhere=ELSEWHERE)
        return run_jobs(jobs_on(named, JOBS), out, facts=facts, run=run_process, work=_own_folder())
    except UsageError as error:
        sys.stderr.write(f"kvcheck gpu: {error}\n")
        return error.exit_code


def _own_folder() -> Path:
    """A folder for the files of this run. Those of runs that have ended go: the archives have their files."""
    for each in WORK.glob("*"):
        if not each.name.isdigit() or not Path("/proc", each.name).exists():
            shutil.rmtree(each, ignore_errors=True)
    own = WORK / str(os.getpid())
    make_folder(own, elsewhere="run it in a copy of this tree that can be written")
    return own


Run = Callable[[Sequence[str], Path, Mapping[str, str], float], int | None]
"""Runs a command line, its output into a file, with variables, and asks it to end after so many seconds: its exit code,
None if it was asked."""


def run_jobs(
    jobs: Sequence[GpuJob], out: Path, *, facts: Mapping[str, object], run: Run, work: Path | None = None
) -> int:
    """Run the jobs in turn and keep the files of `out` current. work: where the jobs write; None: in `out` too."""
    work = work or out
    began = time.monotonic()
    results: list[GpuJobResult] = []
    tool, tests = sanitizer_path(), _test_sources()
    _save(out, work, facts, results, complete=False)
    try:
        for job in jobs:
            left = TOTAL_S - (time.monotonic() - began)
            results.append(_run_job(job, work, tool=tool, tests=tests, left_s=left, run=run))
            sys.stdout.write(_line(results[-1]) + "\n")
            sys.stdout.flush()
            _save(out, work, facts, results, complete=False)
    except KeyboardInterrupt:
        sys.stderr.write(f"kvcheck gpu: interrupted after {len(results)} of {len(jobs)} jobs; see {out}\n")
        return INTERRUPTED
    _save(out, work, facts, results, complete=True)
    verdict = Verdict.worst(result.verdict for result in results)
    sys.stdout.write(f"{verdict.value}  {out / 'summary.txt'}  exit {verdict.exit_code}\n")
    return verdict.exit_code


def _run_job(
    job: GpuJob, out: Path, *, tool: str | None, tests: Mapping[str, str], left_s: float, run: Run
) -> GpuJobResult:
    files, note = chosen_tests(job, tests, _has)
    reason = missing(job, _has, tool)
    if reason is None and job.tests is not None and not files:
        reason = "not run: no test files are there"
    if reason is None and left_s <= GRACE_S:
        reason = f"not run: {max(0.0, left_s):.0f} s of the {TOTAL_S} s of all jobs were left"
    if reason is not None:
        return GpuJobResult(name=job.name, verdict=Verdict.UNKNOWN, reason=reason, budget_s=job.budget_s)
    started = time.monotonic()
    if job.tool is not None and tool is not None:
        probe = under(tool, job.tool, (sys.executable, "-c", TOUCH))
        if (code := run(probe, out / f"{job.name}-probe.log", CONNECTIONS, _asked_s(PROBE_S, left_s))) != 0:
            reason = f"not run: {job.tool} does not work on this machine: one small tensor ended with {code}"
            return GpuJobResult(name=job.name, verdict=Verdict.UNKNOWN, reason=reason, budget_s=job.budget_s)
    command = command_of(job, files, python=sys.executable, out=str(out), tool=tool)
    asked_s = _asked_s(job.budget_s, left_s - (time.monotonic() - started))
    code = run(command, out / f"{job.name}.log", {**CONNECTIONS, **job.variables}, asked_s)
    verdict, reason = judge_end(job, code, out, asked_s=asked_s)
    return GpuJobResult(
        name=job.name,
        verdict=verdict,
        reason=reason,
        exit_code=code,
        duration_s=round(time.monotonic() - started, 1),
        budget_s=job.budget_s,
        command=command,
        lines=(*((note,) if note else ()), *summary_lines(out, job)),
    )


def _asked_s(budget_s: float, left_s: float) -> float:
    """Seconds after which a job is asked to end, so that it has ended within its budget and what is left for all."""
    return max(1.0, min(budget_s, left_s) - GRACE_S)


def run_process(command: Sequence[str], log: Path, variables: Mapping[str, str], asked_s: float) -> int | None:
    """Run a job as a process group. After its time it gets SIGTERM, and what is left of it GRACE_S later is killed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(paths)}
    with log.open("wb") as stream:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
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


def _save(
    out: Path, work: Path, facts: Mapping[str, object], results: Sequence[GpuJobResult], *, complete: bool
) -> None:
    """Both summaries, and the archive of all that the jobs have written."""
    verdict = Verdict.worst(result.verdict for result in results) if complete else Verdict.UNKNOWN
    values = {
        "complete": complete,
        "verdict": verdict.value,
        "environment": dict(facts),
        "jobs": [to_plain(result) for result in results],
    }
    write_text(out / "summary.json", json.dumps(values, indent=1) + "\n", elsewhere=ELSEWHERE)
    lines = [*(f"{name}: {value}" for name, value in facts.items()), ""]
    for result in results:
        lines += [_line(result), *(f"    {line}" for line in result.lines)]
    lines += ["", f"verdict: {verdict.value}" if complete else "not complete"]
    write_text(out / "summary.txt", "\n".join(lines) + "\n", elsewhere=ELSEWHERE)
    _archive(work, out / ARCHIVE)


def _archive(work: Path, archive: Path) -> None:
    """All files below a folder in one, which is replaced whole. Raises UsageError where it cannot be written."""
    with replacing(archive, elsewhere=ELSEWHERE) as draft, tarfile.open(draft, "w:gz", compresslevel=3) as stream:
        for path in sorted(each for each in work.rglob("*") if each.is_file()):
            if path not in (draft, archive):
                stream.add(path, arcname=str(Path("gpu") / path.relative_to(work)), recursive=False)


def _line(result: GpuJobResult) -> str:
    text = f"{result.verdict.value:<8} {result.name:<10} {result.duration_s:6.1f} s of {result.budget_s}"
    return f"{text}  {result.reason}" if result.reason else text


def _device() -> dict[str, object] | str:
    """The device and the libraries, or why nothing can run."""
    if not _has("torch"):
        return "needs torch with CUDA, and this interpreter has none"
    import torch

    if not torch.cuda.is_available():
        return f"needs a CUDA device; torch {torch.__version__} sees none"
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": str(torch.version.cuda),
        **_libraries(),
    }


def _of_threads() -> dict[str, object] | str:
    """The same where threads stand in for a device."""
    if not _has("torch"):
        return "needs torch, and this interpreter has none"
    left_out = ", ".join(job.name for job in JOBS if job.tool is not None)
    return {
        "device": "threads of this machine, which say nothing of a GPU",
        **_libraries(),
        "left out": f"{left_out}: they look at the memory of a CUDA device",
    }


def _libraries() -> dict[str, object]:
    import torch

    packages = ("triton", "typer", "pytest", "hypothesis", "pandas", "matplotlib", "jinja2")
    lacking = ", ".join(name for name in packages if not _has(name))
    return {"torch": torch.__version__, "python": platform.python_version(), "missing": lacking or "nothing"}


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _test_sources() -> dict[str, str]:
    folder = ROOT / "tests"
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("test_*.py"))}


def _end(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
