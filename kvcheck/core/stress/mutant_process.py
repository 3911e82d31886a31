"""Mutants on a CUDA device are judged in a process of their own, and in a new one after a lost context.

Invariants:
- A mutant whose process died is UNKNOWN, and is not sent again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from kvcheck.core.base.devices import number_of
from kvcheck.core.base.errors import HardwareError
from kvcheck.core.base.record import MutantResult, to_plain, value_from
from kvcheck.core.stress.asked_process import AskedProcess, Unanswered
from kvcheck.core.stress.mutant_trials import MutantTask, judge_in_time, lost, not_begun
from kvcheck.core.stress.runner_rows import TargetOf

MUTANTS = "mutants"
"""The argument of a worker that judges mutants, one a line, until its input ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    result: MutantResult
    goes_on: bool = True


def judge_apart(tasks: Sequence[MutantTask], program: str) -> Iterator[MutantResult]:
    with closing(AskedProcess(program, MUTANTS)) as judge:
        for task in tasks:
            try:
                answer: Answer = value_from(Answer, judge.ask(task, until=task.until), "answer")
            except Unanswered as why:
                result = not_begun(task) if why.died is None else lost(task, why.died)
                answer = Answer(result=result, goes_on=False)
            yield answer.result
            if not answer.goes_on:
                judge.close()


def answered(text: str, target_of: TargetOf) -> str:
    from kvcheck.core.cache.backend.cuda import CudaDevice
    from kvcheck.core.stress.runner import Workloads

    task: MutantTask = value_from(MutantTask, json.loads(text), "task")
    try:
        result = judge_in_time(task, target_of, workloads=Workloads())
        is_lost = CudaDevice(number_of(task.device)).is_lost()
    except HardwareError as error:
        result, is_lost = lost(task, str(error)), True
    return json.dumps(to_plain(Answer(result=result, goes_on=not is_lost)))
