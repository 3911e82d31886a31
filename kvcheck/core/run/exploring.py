"""Exploring: every schedule of a workload whose answers differ from the eager order's in at most so many places.

The runs form a tree. Its root answers "yes" to everything, and alone runs under the audit of footprints, which does not
depend on the order. Each run has a child for every question after its last "no".
"""

from __future__ import annotations

import dataclasses
import re
from collections import deque
from collections.abc import Collection

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.run.plan import ANSWERS, NO_EXTRAS, Plan

MOST_ANSWERS = 100_000
_ANSWER = re.compile("m?(0|[1-9][0-9]{0,8})")


class Exploration:
    """first: plan of the first workload; each further one has the next schedule number, and so the next variant.
    within: most answers that differ from the eager order's. explored: number of completed workloads."""

    def __init__(self, first: Plan, *, workloads: int, within: int) -> None:
        self._first, self._workloads, self._within = first, workloads, within
        self._begun = 0
        self._left: deque[tuple[str, ...]] = deque()
        self._seen: set[int] = set()
        self.explored = 0

    def next(self) -> Plan | None:
        if not self._left:
            self.explored = self._begun
            if self._begun == self._workloads:
                return None
            self._begun += 1
            self._left.append(())
            self._seen.clear()
        number = self._first.schedule + self._begun - 1
        refused = self._left.popleft()
        return dataclasses.replace(
            self._first,
            schedule=number,
            strategy=ANSWERS,
            choices=answers_text(refused),
            extras=NO_EXTRAS if refused else None,
        )

    def took(self, refused: tuple[str, ...], asked: tuple[str, ...], trace: int) -> bool:
        """Note a run's "no" answers, questions and host trace. Return True if the trace is new."""
        is_new = trace not in self._seen
        self._seen.add(trace)
        if len(refused) < self._within:
            behind = asked.index(refused[-1]) + 1 if refused else 0
            self._left.extend((*refused, name) for name in asked[behind:])
        return is_new

    @property
    def scope(self) -> str | None:
        return scope_text(self.explored, within=self._within)

    @property
    def gap(self) -> str | None:
        if self.explored == self._workloads:
            return None
        return (
            f"{self.explored} of {counted(self._workloads, 'workload')} were run within "
            f"{counted(self._within, 'answer')}; of the next one, "
            f"{counted(len(self._left), 'schedule')} or more are left"
        )


def scope_text(workloads: int, *, within: int) -> str | None:
    if not workloads:
        return None
    return f"every schedule within {counted(within, 'answer')} of the eager order, of {counted(workloads, 'workload')}"


def answers_text(refused: Collection[str]) -> str:
    return ".".join(refused) or "none"


def parse_answers(text: str) -> tuple[str, ...]:
    """Inverse of answers_text. Raises UsageError."""
    names = () if text == "none" else tuple(text.split("."))
    if len(names) > MOST_ANSWERS or not all(_ANSWER.fullmatch(each) for each in names):
        raise UsageError(
            'choices: expected numbers of questions and messages, such as 12.m345, or "none"; '
            f"got {text[:40]!r}; copy the whole line"
        )
    return names
