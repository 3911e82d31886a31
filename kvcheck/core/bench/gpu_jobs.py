"""The jobs of `make gpu`: a table of them, what each job needs, and what its exit code means.

Invariants:
- The budgets of all jobs together are under eight minutes; the most telling jobs come first.
- A job that did not run, ran out of time, or ran no test is UNKNOWN with the reason, never a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import RunRecord, Verdict, read_record
from kvcheck.core.report.store import RUN_FILE

TOTAL_S = 480
SANITIZER = "compute-sanitizer"
SANITIZER_FOUND = 99
"""What the sanitizer is told to exit with where it found something; no test runner does."""

SANITIZED = ("test_page_copy.py", "test_packed_rows.py", "test_content_rows.py", "test_digest.py")
"""Tests of kernels that end by themselves. Not test_hold.py: a hold spins, under a sanitizer for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJob:
    """One process. arguments: those of the interpreter; "{out}" is the folder of all results, "{tests}" the test files,
    "{device}" what it runs on.

    needs: modules without which it cannot run. tests: which files of the folder of tests. tool: of the sanitizer, if
    any. over_threads: what takes the place of its arguments where threads stand in for a device.
    """

    name: str
    budget_s: int
    arguments: tuple[str, ...]
    needs: tuple[str, ...]
    tests: Callable[[str], bool] | None = None
    tool: str | None = None
    over_threads: tuple[str, ...] | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


def _is_kernel_test(path: str) -> bool:
    """Not of ranks either: each of them is a process that compiles its kernels anew, which no budget here has room
    for."""
    return "litmus" not in path and "ranks" not in path


def _is_sanitized(path: str) -> bool:
    return Path(path).name in SANITIZED


def _is_litmus(path: str) -> bool:
    return "litmus" in path


# The options of pyproject.toml name plugins that may be missing here.
_PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default")
_STRICT = ("--import-mode=importlib", "--strict-markers", "--junitxml={out}/{name}.xml")
_KVCHECK = ("-m", "kvcheck")
_RUN = ("--seed", "1", "--no-reports", "--out", "{out}/runs/{name}")
_RANKS = (
    *(*_KVCHECK, "stress", "nvlink-aux", "pd-transfer", "--transport", "ipc", "--shape", "llama-3-tiny"),
    *("--requests", "6", "--schedules", "3", "--max-time", "18"),
)
"""Two processes a schedule; nvlink-aux first, whose first schedule is that of bug e. Threads have no memory that two
processes share, so over them it is the host's."""


def _sanitizer(tool: str, budget_s: int, *, chosen: str | None = None) -> GpuJob:
    """chosen: which tests, as pytest's -k has it; None: all of them."""
    return GpuJob(
        name=tool,
        budget_s=budget_s,
        arguments=(
            *(*_PYTEST, *_STRICT, "-m", "gpu", "--no-poison"),
            *(() if chosen is None else ("-k", chosen)),
            "{tests}",
        ),
        needs=("pytest",),
        tests=_is_sanitized,
        tool=tool,
        variables={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # every tensor is an allocation that the tool knows
    )


JOBS: tuple[GpuJob, ...] = (
    GpuJob(
        name="compile",
        budget_s=25,
        arguments=("tests/rigs/compile_all.py",),
        needs=("pytest", "triton"),
    ),
    GpuJob(name="doctor", budget_s=15, arguments=(*_KVCHECK, "doctor", "--out", "{out}/runs"), needs=("typer",)),
    GpuJob(
        name="litmus",
        budget_s=45,
        arguments=(*_PYTEST, *_STRICT, "{tests}"),
        needs=("pytest",),
        tests=_is_litmus,
    ),
    GpuJob(
        name="kernels",
        budget_s=50,
        arguments=(*_PYTEST, *_STRICT, "-m", "gpu", "{tests}"),
        over_threads=(*_PYTEST, *_STRICT, "-m", "not gpu and not compiled", "tests/kernels"),
        needs=("pytest",),
        tests=_is_kernel_test,
    ),
    GpuJob(
        name="reference",
        budget_s=20,
        arguments=(
            *(*_KVCHECK, "stress", "--backend", "eager", "--shape", "llama-3-tiny", "--shape", "qwen3-next-tiny"),
            *("--schedules", "3", "--max-time", "8", *_RUN),
        ),
        over_threads=(
            *(*_KVCHECK, "stress", "hicache", "retract-resume", "--backend", "eager", "--shape", "llama-3-tiny"),
            *("--schedules", "3", "--max-time", "8", *_RUN),
        ),
        needs=("typer",),
    ),
    GpuJob(
        name="stress",
        budget_s=85,
        arguments=(
            *(*_KVCHECK, "stress", "--device", "{device}", "--strategy", "delay", "--schedules", "9"),
            *("--max-time", "69", *_RUN),
        ),
        over_threads=(
            *(*_KVCHECK, "stress", "--device", "{device}", "--strategy", "delay", "--shape", "llama-3-tiny"),
            *("--schedules", "4", "--max-time", "69", *_RUN),
        ),
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="ranks",
        budget_s=30,
        arguments=(*_RANKS, "--device", "{device}", *_RUN),
        over_threads=(*_RANKS, *_RUN),
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="mutants",
        budget_s=65,
        arguments=(*_KVCHECK, "selftest", "--device", "{device}", "--max-time", "48", *_RUN),
        over_threads=(
            *(*_KVCHECK, "selftest", "gate-waits-wrong-entry", "load-without-pin", "write-back-without-pin"),
            *("--device", "{device}", "--max-time", "48", *_RUN),
        ),
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="bench",
        budget_s=30,
        arguments=(*_KVCHECK, "bench", "--device", "{device}", "--max-time", "17", *_RUN),
        over_threads=(
            *(*_KVCHECK, "bench", "guarded-read", "layer-load", "decode-step", "--device", "{device}"),
            *("--shape", "glm-5.1-tiny", "--rounds", "6", "--max-time", "17", *_RUN),
        ),
        needs=("typer",),
    ),
    _sanitizer("memcheck", 60),
    _sanitizer("initcheck", 55, chosen="not torch"),  # torch forms are kernels of torch
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJobResult:
    """What became of a job. exit_code: of its process, None where there was none. lines: for the summary."""

    name: str
    verdict: Verdict
    reason: str | None = None
    exit_code: int | None = None
    duration_s: float = 0.0
    budget_s: int = 0
    command: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def jobs_on(device: str, jobs: Sequence[GpuJob] = JOBS) -> list[GpuJob]:
    """The jobs as they run on a device. Threads have no memory that a sanitizer of CUDA looks at, and two cores have
    room for less than a GPU does."""
    return [_on_device(job, device) for job in jobs if job.tool is None or device != "threads"]


def _on_device(job: GpuJob, device: str) -> GpuJob:
    given = job.over_threads if device == "threads" and job.over_threads is not None else job.arguments
    return replace(job, arguments=tuple(each.replace("{device}", device) for each in given))


def missing(job: GpuJob, has: Callable[[str], bool], tool: str | None) -> str | None:
    """Why a job cannot run here, or None. tool: where the sanitizer is."""
    lacking = [name for name in job.needs if not has(name)]
    if lacking:
        return f"not run: {', '.join(lacking)} is missing"
    if job.tool is not None and tool is None:
        return f"not run: {SANITIZER} is neither on PATH nor in a CUDA toolkit"
    return None


def chosen_tests(job: GpuJob, sources: Mapping[str, str], has: Callable[[str], bool]) -> tuple[list[str], str | None]:
    """The test files of a job, and which were left out. sources: text of every test file, by path.

    With a marker, only files with marked tests are chosen. Files that import missing modules are left out.
    """
    if job.tests is None:
        return [], None
    wanted = [path for path in sorted(sources) if Path(path).name.startswith("test_") and job.tests(path)]
    if "gpu" in job.arguments:
        wanted = [path for path in wanted if "mark.gpu" in sources[path]]
    left = [path for path in wanted if not has("hypothesis") and "hypothesis" in sources[path]]
    note = f"left out because hypothesis is missing: {', '.join(Path(path).name for path in left)}" if left else None
    return [path for path in wanted if path not in left], note


def command_of(job: GpuJob, tests: Sequence[str], *, python: str, out: str, tool: str | None) -> tuple[str, ...]:
    """The command line of a job."""
    line: list[str] = [python]
    if job.tool is not None and tool is not None:
        line = [tool, "--tool", job.tool, "--error-exitcode", str(SANITIZER_FOUND), python]
    for argument in job.arguments:
        if argument == "{tests}":
            line += tests
        else:
            line.append(argument.replace("{out}", out).replace("{name}", job.name))
    return tuple(line)


def judge_end(job: GpuJob, exit_code: int | None, out: Path, *, asked_s: float) -> tuple[Verdict, str | None]:
    """The result of a job that has ended. exit_code: None if it was asked to end, which was after so many seconds."""
    if exit_code is None:
        return Verdict.UNKNOWN, f"asked to end after {asked_s:.0f} s, to save what it had; that is there"
    if job.tool is not None and exit_code == SANITIZER_FOUND:
        return Verdict.FAIL, f"{job.tool} found errors; see the log"
    if job.tests is None:
        if exit_code in (0, 1):
            return (Verdict.PASS, None) if not exit_code else (Verdict.FAIL, "exit 1; see the log")
        return Verdict.UNKNOWN, f"exit {exit_code}; see the log"
    return _tests_judged(exit_code, out / f"{job.name}.xml")


def _tests_judged(exit_code: int, report: Path) -> tuple[Verdict, str | None]:
    """A run of tests in which every one was skipped ends with 0, and is no pass."""
    if exit_code == 1:
        return Verdict.FAIL, "tests failed; see the log"
    if exit_code:
        return Verdict.UNKNOWN, f"the test runner ended with exit {exit_code}; see the log"
    try:
        suites = [*ElementTree.parse(report).getroot().iter("testsuite")]
        tests, skipped = (sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped"))
    except (OSError, ElementTree.ParseError, ValueError) as error:
        return Verdict.UNKNOWN, f"the test runner left no report: {error}"
    if tests == skipped:
        return Verdict.UNKNOWN, f"all {tests} tests were skipped"
    return Verdict.PASS, f"{tests - skipped} tests passed, {skipped} were skipped"


def summary_lines(out: Path, job: GpuJob) -> tuple[str, ...]:
    """The lines that a job's record adds to the summary: each mutant, and the warnings, which hold the rates."""
    lines: list[str] = []
    for path in sorted((out / "runs" / job.name).glob(f"*/{RUN_FILE}")):
        try:
            record = read_record(path)
        except UsageError as error:
            lines.append(f"no record: {error}")
            continue
        lines += _record_lines(record)
    return tuple(lines)


def _record_lines(record: RunRecord) -> list[str]:
    rows = [f"{row.name}: {row.outcome}, {row.message or 'no message'}" for row in record.mutants]
    unknown = [row for row in record.scenarios if row.verdict is Verdict.UNKNOWN]
    short = [f"{row.id}: {row.reason}" for row in unknown if row.schedules]
    found = [f"{finding.code} {finding.message}" for finding in record.findings[:10]]
    never = _never_ran([str(row.reason) for row in unknown if not row.schedules], len(record.scenarios))
    return [*rows, *found, *short, *never, *record.warnings]


def _never_ran(reasons: Sequence[str], cells: int) -> list[str]:
    """How many cells never ran, in one line. reasons: why not, of each of them. cells: of the run."""
    if not reasons:
        return []
    (reason, count), *others = Counter(reasons).most_common()
    of_them = f", {count} of them for this reason" if others else ""
    return [f"{len(reasons)} of {counted(cells, 'cell')} never ran{of_them}: {reason}"]
