"""The jobs of `make gpu`: what each runs on a device and over threads, what it needs, and its budget.

Invariants:
- The budgets of all jobs together are under eight minutes; the most telling jobs come first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOTAL_S = 480
SANITIZED = ("test_page_copy.py", "test_packed_rows.py", "test_content_rows.py", "test_digest.py")
"""Tests of kernels that end by themselves. Not test_hold.py: a hold spins, under a sanitizer for minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuJob:
    """One process of the interpreter. words: its arguments, as a shell splits them; "{tests}" are the test files.

    over_threads: its arguments where threads stand in for a device, and two cores have room for less; None: the same.
    needs: modules without which it cannot run. tests: which test files. tool: of the sanitizer, if any.
    """

    name: str
    budget_s: int
    words: str
    over_threads: str | None = None
    needs: tuple[str, ...]
    tests: Callable[[str], bool] | None = None
    tool: str | None = None


# The options of pyproject.toml name plugins that may be missing here.
_PYTEST = (
    "-m pytest -q -p no:cacheprovider -o addopts= -o filterwarnings=default --import-mode=importlib --strict-markers "
    "--junitxml={out}/{name}.xml"
)
_RUN = "--seed 1 --no-reports --out {out}/runs/{name}"
_REFERENCE = f"-m kvcheck stress --backend eager --shape llama-3-tiny --schedules 3 --max-time 8 {_RUN}"
_DELAYS = f"-m kvcheck stress --strategy delay --max-time 69 {_RUN}"
_RANKS = (
    "-m kvcheck stress nvlink-aux pd-transfer --transport ipc --shape llama-3-tiny --requests 6 --schedules 3 "
    f"--max-time 18 {_RUN}"
)
"""Two processes a schedule; nvlink-aux first, whose first schedule is that of bug e. Threads have no memory that two
processes share, so over them it is the host's."""
_MUTANTS = f"-m kvcheck selftest --max-time 48 {_RUN}"
_BENCH = f"-m kvcheck bench --max-time 17 {_RUN}"


def _is_kernel_test(path: str) -> bool:
    """Not of ranks either: each of them is a process that compiles its kernels anew, for which no budget has room."""
    return "litmus" not in path and "ranks" not in path


def _sanitizer(tool: str, budget_s: int, options: str = "") -> GpuJob:
    words = f"{_PYTEST} -m gpu --no-poison {options} {{tests}}"
    chosen = {str(Path("tests/kernels", name)) for name in SANITIZED}
    return GpuJob(
        name=tool, budget_s=budget_s, words=words, needs=("pytest",), tests=lambda path: path in chosen, tool=tool
    )


JOBS = (
    GpuJob(name="compile", budget_s=25, words="tests/rigs/compile_all.py", needs=("pytest", "triton")),
    GpuJob(name="doctor", budget_s=15, words="-m kvcheck doctor --out {out}/runs", needs=("typer",)),
    GpuJob(
        name="litmus",
        budget_s=45,
        words=f"{_PYTEST} {{tests}}",
        needs=("pytest",),
        tests=lambda path: "litmus" in path,
    ),
    GpuJob(
        name="kernels",
        budget_s=50,
        words=f"{_PYTEST} -m gpu {{tests}}",
        over_threads=f"{_PYTEST} -m 'not gpu and not compiled' tests/kernels",
        needs=("pytest",),
        tests=_is_kernel_test,
    ),
    GpuJob(
        name="reference",
        budget_s=20,
        words=f"{_REFERENCE} --shape qwen3-next-tiny",
        over_threads=f"{_REFERENCE} hicache retract-resume",
        needs=("typer",),
    ),
    GpuJob(
        name="stress",
        budget_s=85,
        words=f"{_DELAYS} --device cuda --schedules 9",
        over_threads=f"{_DELAYS} --device threads --shape llama-3-tiny --schedules 4",
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="ranks",
        budget_s=30,
        words=f"{_RANKS} --device cuda",
        over_threads=_RANKS,
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="mutants",
        budget_s=65,
        words=f"{_MUTANTS} --device cuda",
        over_threads=f"{_MUTANTS} --device threads gate-waits-wrong-entry load-without-pin write-back-without-pin",
        needs=("typer", "triton"),
    ),
    GpuJob(
        name="bench",
        budget_s=30,
        words=f"{_BENCH} --device cuda",
        over_threads=f"{_BENCH} --device threads guarded-read layer-load decode-step --shape glm-5.1-tiny --rounds 6",
        needs=("typer",),
    ),
    _sanitizer("memcheck", 60),
    _sanitizer("initcheck", 55, "-k 'not torch'"),  # torch forms are kernels of torch
)
