"""Mutants on a CUDA device are judged in a process of their own, and behind a lost context in a new one.

Invariants:
- The parent asks for one mutant a line, and the process answers with one line. Nothing is unpickled.
- A mutant is asked for once. One whose process died is UNKNOWN, and those behind it are judged by a new process.
"""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcheck.core.base.child import Streams, end, listen, start, tell
from kvcheck.core.base.devices import number_of
from kvcheck.core.base.errors import InternalError, UnknownVerdict, UsageError
from kvcheck.core.base.record import MutantResult, to_plain, value_from
from kvcheck.core.stress.cell_workers import BEGUN, ENDING_S, LATE_S
from kvcheck.core.stress.mutant_trials import MutantTask, judge_in_time, lost, not_begun
from kvcheck.core.stress.runner_rows import TargetOf

MUTANTS = "mutants"
"""The argument with which a worker judges mutants, one a line, until its input ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What became of a mutant. goes_on: the process can judge another one."""

    result: MutantResult
    goes_on: bool = True


def judge_apart(tasks: Sequence[MutantTask], program: str) -> Iterator[MutantResult]:
    """The result of each mutant, from processes that run this module."""
    judge: _Judge | None = None
    try:
        for task in tasks:
            judge = judge or _Judge(program)
            answer = judge.ask(task)
            yield answer.result
            if not answer.goes_on:
                judge.close()
                judge = None
    finally:
        if judge is not None:
            judge.close()


def answered(text: str, target_of: TargetOf) -> str:
    """In the process: the answer to a line."""
    from kvcheck.core.cache.backend.cuda import CudaDevice
    from kvcheck.core.stress.runner import Workloads

    task: MutantTask = value_from(MutantTask, json.loads(text), "task")
    result = judge_in_time(task, target_of, workloads=Workloads())
    is_lost = CudaDevice(number_of(task.device)).is_lost()
    return json.dumps(to_plain(Answer(result=result, goes_on=not is_lost)))


class _Judge:
    """A process that judges mutants."""

    def __init__(self, program: str) -> None:
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        streams = Streams(stdin=subprocess.PIPE)
        self._process = start(program, MUTANTS, streams=streams, variables={"OMP_NUM_THREADS": "1"})
        self._has_begun = False
        listen(self._process, self._lines.put)

    def ask(self, task: MutantTask) -> Answer:
        """Judge a mutant. Raises what the process says that it failed with, and UnknownVerdict if it never began."""
        tell(self._process, json.dumps(to_plain(task)))
        while True:
            patience_s = None if task.until is None else max(0.0, task.until + LATE_S - time.monotonic())
            try:
                line = self._lines.get(timeout=patience_s)
            except queue.Empty:
                return Answer(result=not_begun(task), goes_on=False)
            if line is None:
                return Answer(result=lost(task, self._death()), goes_on=False)
            if line.strip() == BEGUN:
                self._has_begun = True
                continue
            said = json.loads(line)
            if said.get("error") is not None:
                kind = {2: UsageError, 4: UnknownVerdict}.get(said["exit_code"], InternalError)
                raise kind(str(said["error"]))
            answer: Answer = value_from(Answer, said, "answer")
            return answer

    def close(self) -> None:
        end(self._process, within_s=ENDING_S)
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def _death(self) -> str:
        why = f"the process that judged it ended with status {self._process.wait()}"
        if not self._has_begun:
            raise UnknownVerdict(f"{why} while kvcheck was loaded, before its first mutant")
        return why
