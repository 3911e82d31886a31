"""Rows, runs and noise for the tests of the gate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rigs.literal_record import FOREIGN, PASSED

from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import (
    BenchRow,
    Coverage,
    Evidence,
    Identity,
    Interval,
    RunRecord,
    ScenarioResult,
    Verdict,
)
from kvcheck.core.base.rounds import floor_of, ratio_interval
from kvcheck.core.bench.measure import machine
from kvcheck.core.report.gate.judge import BudgetedRow, Measurement, Overhead, Rules, StoredRow, decide
from kvcheck.core.run.session import environment, tool

ONE = Interval(1.0, 1.0, 1.0)
STEPS = tuple(step / 1000 for step in range(-7, 8))
"""Fifteen rounds around 1 that are nearly quiet."""


def bench_row(ratio: float = 1.0, *, rounds: Sequence[float] = STEPS, **changed: Any) -> BenchRow:
    """A row whose rounds are `ratio` and a little noise."""
    row = BenchRow(
        case="read",
        arm="packed",
        baseline="views",
        size="row",
        shape="glm-5.1",
        device="cpu",
        bytes=None,
        us=ONE,
        baseline_us=ONE,
        ratio=ONE,
        floor=0.004,
        ratios=tuple(ratio * (1 + each) for each in rounds),
    )
    return replace(row, **changed)


def gated(row: BenchRow, budget: float = 1.0, bound: str = "max_ratio") -> BudgetedRow:
    return BudgetedRow(StoredRow("run", row), bound, budget)


def judged(
    *looks: BenchRow | str, rules: Rules | None = None, bound: str = "max_ratio"
) -> tuple[Overhead, list[Measurement]]:
    """The verdict on one row against a budget of 1, when measuring again finds the other rows in their order."""
    answers = list(looks[1:])
    first = looks[0]
    assert isinstance(first, BenchRow)
    ((row,), is_complete) = decide([gated(first, bound=bound)], rules or Rules(), lambda rows: [answers.pop(0)])
    assert is_complete and not answers, "each measurement was asked for"
    return row.verdict, list(row.measurements)


def noisy_row(random: np.random.Generator, ratio: float, *, rounds: int, sd: float, kind: str) -> BenchRow:
    """Rounds as a busy machine gives them: with heavy tails, a drift, or each run off by something of its own."""

    def draw() -> np.ndarray[Any, Any]:
        if kind == "heavy tails":
            return sd * random.standard_t(2, rounds)
        noise = random.normal(0, sd, rounds)
        if kind == "drift":
            return noise + np.linspace(-sd, sd, rounds)
        return noise + (0.3 * sd * random.standard_normal() if kind == "off" else 0.0)

    logs = draw() + np.log(ratio)
    return replace(
        bench_row(), ratios=tuple(np.exp(logs).tolist()), floor=floor_of(draw().tolist()), ratio=ratio_interval(logs)
    )


def bench_run(*rows: BenchRow, **changed: Any) -> RunRecord:
    cases = [*dict.fromkeys(row.case for row in rows)] or ["read"]
    record = replace(
        PASSED,
        run_id="20260102-030406-0b0b",
        scenarios=tuple(measured(case) for case in cases),
        evidence=Evidence(),
        bench=rows,
        tool=tool(),
        environment={**environment(), "hardware": machine()},
        plan={"shape": "glm-5.1", "cases": cases},
    )
    return replace(record, **changed)


def measured(case: str) -> ScenarioResult:
    """The verdict on a case whose arms did their work."""
    return ScenarioResult(id=case, shape="glm-5.1", verdict=Verdict.PASS, schedules=15)


def of_this_build(record: RunRecord) -> RunRecord:
    return replace(record, identity=Identity(code=code_digest()))


def vllm_run(code: str = "KV102") -> RunRecord:
    """A run of vLLM 0.33.0 whose priority policy serves blocks that nothing computed, as its release does."""
    shapes = ("scheduler.priority", "scheduler.priority-lookahead")
    counted = Evidence(schedules=1, events=40, requests=4, words_verified={"kv": 512})
    rows = tuple(
        ScenarioResult(
            id=f"preemption/{shape}",
            shape=shape,
            verdict=Verdict.FAIL,
            schedules=1,
            evidence=counted,
            coverage=Coverage(wanted=12, floor=12),
        )
        for shape in shapes
    )
    return replace(
        PASSED,
        run_id="20260102-030407-0d0d",
        verdict=Verdict.FAIL,
        exit_code=1,
        scenarios=rows,
        evidence=counted.plus(counted),
        plan={"cells": [f"preemption:shape={shape},target=vllm%3Aenvs/vllm,seed=1,schedule=0" for shape in shapes]},
        environment={"engine": {"engine": "vllm", "version": "0.33.0"}},
        identity=Identity(code=code_digest(), target="0123456789abcdef" * 4),
        findings=tuple(
            replace(FOREIGN, id=f"20260102-030407-0d0d.{n}", code=code, buffer="kv", scenario="preemption", shape=shape)
            for n, shape in enumerate(shapes, 1)
        ),
    )
