"""Campaign: edits as orders for forked processes, and the result of each.

Invariants:
- The same source, seed and sample give the same edits and the same schedules in the same order.
- A finding counts as a kill only if the code as it is passes the same plan.
- Each result is yielded as soon as it is known.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kvcheck.core.run.plan import FLOOR, parse_line
from tools.mutation.edits import Edit, diff_of
from tools.mutation.forks import Answer, Forks, Order
from tools.mutation.reach import Reach
from tools.mutation.results import Result
from tools.mutation.survey import Survey, reach_of

ENDLESS_TIMES = 50
ENDLESS_LEAST_S = 20.0
"""A schedule counts as endless after so many times the CPU time that its cell needs, and no sooner than this."""
STUCK_CPU_S = 8.0
"""CPU seconds without progress that end a schedule as a hang. A default run waits for longer. A schedule of a tiny
shape takes 3 seconds in all."""
SPARE_CPU_S = 20.0
"""CPU seconds for the imports of a trial and for the last schedule, which may end after the budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The subject of one trial: a text for each changed file, and the head of its result.

    reached: cell -> a bit for each traced schedule that the change can matter in. earlier: a plan line to run first.
    is_in_turn: cells take turns, as in a default run, whatever they cost.
    """

    result: Result
    texts: Mapping[str, str]
    reached: Mapping[str, int]
    earlier: str = ""
    is_in_turn: bool = False


def subject_of(edit: Edit, text: str, reach: Reach, earlier: str = "") -> Subject:
    reached = reach.of(edit.file, edit.first, edit.last)
    result = Result(
        id=edit.id,
        file=edit.file,
        line_number=edit.line,
        function=edit.function,
        operator=edit.operator,
        diff=diff_of(edit, text),
        outcome="unreached",
        reaching=len(reached),
        is_guard=edit.is_guard,
    )
    return Subject(result=result, texts={edit.file: edit.applied(text)}, reached=reached, earlier=earlier)


class Judge:
    """Judges subjects, each in a forked process. schedules: of each cell. cpu_s: of each subject."""

    def __init__(self, forks: Forks, survey: Survey, *, schedules: int, cpu_s: float) -> None:
        self._forks, self._survey = forks, survey
        self._schedules, self._cpu_s = schedules, cpu_s
        self._cells = survey.cells()
        self.reach = reach_of(self._cells)
        self._usual = {each.cell: max(each.cpu_s) for each in self.reach.cells}
        self._clean: set[str] = set()

    def results(self, subjects: Iterable[Subject]) -> Iterator[Result]:
        waiting = iter(subjects)
        doubted: list[Result] = []
        done: list[Result] = []

        def next_order() -> Order | None:
            if doubted:
                kill = doubted.pop()
                return self._order(kill, {}, [kill.line])
            for subject in waiting:
                if subject.reached:
                    return self._order(subject.result, subject.texts, self._lines(subject))
                done.append(subject.result)
            return None

        for order, answer in self._forks.answers(next_order):
            result = order.about
            assert isinstance(result, Result)
            if result.is_kill:
                done.append(self._confirmed(result, answer))
            elif (found := _found(result, answer)).is_kill and not self._is_known_clean(found.line):
                doubted.append(found)
            else:
                done.append(found)
            yield from done
            done.clear()
        yield from done

    def _order(self, result: Result, texts: Mapping[str, str], lines: list[str]) -> Order:
        runs = [(line, max(ENDLESS_LEAST_S, ENDLESS_TIMES * self._usual[parse_line(line).cell])) for line in lines]
        return Order(
            about=result,
            work="judge",
            arguments={"runs": runs, "cells": self._cells, "cpu_s": self._cpu_s, "stuck_cpu_s": STUCK_CPU_S},
            texts=texts,
            most_cpu_s=self._cpu_s + max(most for _, most in runs) + SPARE_CPU_S,
        )

    def _lines(self, subject: Subject) -> list[str]:
        runs = self.reach.runs(subject.reached, self._schedules, floor=FLOOR)
        if subject.is_in_turn:
            runs.sort(key=lambda run: run[1])
        lines = [self._survey.plan(cell, number).line() for cell, number in runs]
        is_earlier = bool(subject.earlier) and self._survey.has(parse_line(subject.earlier))
        return [*dict.fromkeys([subject.earlier, *lines] if is_earlier else lines)]

    def _is_known_clean(self, line: str) -> bool:
        """Whether the code as it is passes a plan: one that the survey has run, or that was tried since."""
        plan = parse_line(line)
        return line in self._clean or (plan.schedule < self._survey.traced and self._survey.has(plan))

    def _confirmed(self, kill: Result, answer: Answer) -> Result:
        """The result of an edit that was killed by a plan, once the code as it is has run that plan too."""
        if answer.said.get("outcome") == "survived":
            self._clean.add(kill.line)
            return kill
        note = f"the code as it is fails this plan too: {answer.said.get('message') or answer.ended}"
        return replace(kill, outcome="unclear", note=note)


def _found(result: Result, answer: Answer) -> Result:
    said = answer.said
    outcome, message, line = str(said.get("outcome", "")), str(said.get("message", "")), str(said.get("line", ""))
    if not outcome:
        outcome, line = "crash", answer.at
        message = f"the process ended by signal {-answer.ended}" if answer.ended < 0 else f"status {answer.ended}"
        if answer.stalled:
            outcome, message = "hang", "the process waited for what did not come"
        elif answer.ended == -signal.SIGXCPU:
            outcome, message = "hang", "a loop that no signal handler interrupts"
    return replace(
        result,
        outcome=outcome,
        message=message,
        line=line,
        oracle=str(said.get("oracle", "")),
        code=str(said.get("code", "")),
        kinds=tuple(said.get("kinds", ())),
        cells=said.get("cells", {}),
        schedules=said.get("schedules", 0),
        cpu_s=said.get("cpu_s", 0.0),
        total_cpu_s=answer.total_cpu_s,
        note=str(said.get("broken", "")),
    )
