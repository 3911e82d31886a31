"""Campaign: takes edits from a list, gives them to servers of trials, and keeps what came of each.

Invariants:
- The same source, seed and sample give the same edits and the same schedules in the same order.
- A finding counts as a kill only if the code as it is passes the same plan.
- Each result is kept as soon as it is known.
"""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvcheck.core.run.plan import FLOOR, parse_line
from kvcheck.core.stress.mutation.edits import Edit, diff_of
from kvcheck.core.stress.mutation.pool import Answer, ServerPool
from kvcheck.core.stress.mutation.pristine import Pristine
from kvcheck.core.stress.mutation.reach import Reach
from kvcheck.core.stress.mutation.results import Result

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
    """What one trial is about: a text for each changed file, and how it is reported.

    reached: cell -> a bit for each traced schedule that the change can matter in. earlier: a plan line to run first.
    is_in_turn: cells take turns, as in a default run, whatever they cost.
    """

    result: Result
    texts: Mapping[str, str]
    reached: Mapping[str, int]
    earlier: str = ""
    is_in_turn: bool = False


def subject_of(edit: Edit, text: str, reach: Reach, earlier: str = "") -> Subject:
    """A generated edit as a subject."""
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


def sampled(edits: Sequence[Edit], count: int | None, seed: int) -> list[Edit]:
    """So many edits, spread over the files and operators by their numbers; all of them for None. In the order given."""
    if count is None or count >= len(edits):
        return [*edits]
    strata: dict[tuple[str, str], list[Edit]] = {}
    for edit in edits:
        strata.setdefault((edit.file, edit.operator), []).append(edit)
    places = []
    for key, rows in strata.items():
        ranked = sorted(rows, key=lambda edit: _draw(seed, edit.id))
        offset = _draw(seed, *key) / (1 << 64)
        # The n-th of a stratum of m is due after n/m of the sample, so every stratum has its share at every length.
        places += [((at + offset) / len(rows), edit.id, edit) for at, edit in enumerate(ranked)]
    chosen = {edit.id for _, _, edit in sorted(places, key=lambda each: each[:2])[:count]}
    return [edit for edit in edits if edit.id in chosen]


def _draw(seed: int, *words: str) -> int:
    """A number that seed and words decide, of 64 bits."""
    return int.from_bytes(hashlib.sha256("\0".join((str(seed), *words)).encode()).digest()[:8], "big")


class Judge:
    """Judges subjects on a pool of servers. schedules: of each cell. cpu_s: of each subject."""

    def __init__(self, pool: ServerPool, pristine: Pristine, *, schedules: int, cpu_s: float) -> None:
        self._pool, self._pristine = pool, pristine
        self._reach = pristine.reach()
        self._schedules, self._cpu_s = schedules, cpu_s
        self._clean: dict[str, bool] = {}
        self._usual = {each.cell: max(each.cpu_s) for each in self._reach.cells}

    def results(self, subjects: Sequence[Subject]) -> Iterator[Result]:
        """A result for each subject, in the order in which they are known."""
        waiting = iter(subjects)
        open_orders: dict[int, tuple[Subject, Result | None]] = {}
        again: list[tuple[Subject, Result | None]] = []
        done: list[Result] = []
        count = 0

        def next_order() -> Mapping[str, object] | None:
            nonlocal count
            while True:
                subject, doubt = again.pop(0) if again else (next(waiting, None), None)
                if subject is None:
                    return None
                if not subject.reached:
                    done.append(subject.result)
                    continue
                count += 1
                open_orders[count] = (subject, doubt)
                return self._order(count, subject, doubt)

        for answer in self._pool.answers(next_order):
            subject, doubt = open_orders.pop(answer.number)
            found = self._judged(subject, doubt, answer)
            if found.outcome == "killed" and not self._is_known_clean(found.line):
                again.append((subject, found))
            else:
                done.append(found)
            yield from done
            done.clear()
        yield from done

    def _order(self, number: int, subject: Subject, doubt: Result | None) -> Mapping[str, object]:
        lines = [doubt.line] if doubt is not None else self._lines(subject)
        runs = [(line, max(ENDLESS_LEAST_S, ENDLESS_TIMES * self._usual[parse_line(line).cell])) for line in lines]
        return {
            "number": number,
            "kind": "judge",
            "texts": {} if doubt is not None else subject.texts,
            "runs": runs,
            "cpu_s": self._cpu_s,
            "stuck_cpu_s": STUCK_CPU_S,
            "most_cpu_s": self._cpu_s + max(most for _, most in runs) + SPARE_CPU_S,
            "references": str(self._pristine.folder),
        }

    def _lines(self, subject: Subject) -> list[str]:
        runs = self._reach.runs(subject.reached, self._schedules, floor=FLOOR)
        if subject.is_in_turn:
            runs.sort(key=lambda run: run[1])
        lines = [self._pristine.plan(cell, number).line() for cell, number in runs]
        earlier = [subject.earlier] if subject.earlier and self._is_of_run(subject.earlier) else []
        return [*dict.fromkeys((*earlier, *lines))]

    def _is_of_run(self, line: str) -> bool:
        """Whether a plan line is one of this run's: others have workloads whose outputs are not known."""
        plan = parse_line(line)
        is_known = plan.cell in self._usual and plan.schedule < self._schedules
        return is_known and plan == self._pristine.plan(plan.cell, plan.schedule)

    def _judged(self, subject: Subject, doubt: Result | None, answer: Answer) -> Result:
        found = _found(subject.result, answer) if doubt is None else doubt
        if doubt is None:
            return found
        self._clean[doubt.line] = answer.said.get("outcome") == "survived"
        if not self._clean[doubt.line]:
            note = f"the code as it is fails this plan too: {answer.said.get('message') or answer.ended}"
            return replace(found, outcome="unclear", note=note)
        return found

    def _is_known_clean(self, line: str) -> bool:
        plan = parse_line(line)
        is_traced = plan.schedule < self._pristine.traced and self._pristine.plan(plan.cell, plan.schedule) == plan
        return is_traced or self._clean.get(line, False)


def _found(result: Result, answer: Answer) -> Result:
    """The result with what an answer says."""
    said = answer.said
    outcome, message, line = str(said.get("outcome", "")), str(said.get("message", "")), str(said.get("line", ""))
    if not outcome:
        outcome, line = "crash", answer.at
        message = f"the process ended by signal {-answer.ended}" if answer.ended < 0 else f"status {answer.ended}"
        if answer.stalled:
            outcome, message = "hang", "the process waited for what did not come"
        elif answer.ended == -signal.SIGXCPU:
            outcome, message = "hang", "a loop that no signal handler interrupts"
    kinds: Sequence[str] = said.get("kinds", ())  # type: ignore[assignment]
    cells: Mapping[str, int] = said.get("cells", {})  # type: ignore[assignment]
    return replace(
        result,
        outcome=outcome,
        message=message,
        line=line,
        oracle=str(said.get("oracle", "")),
        code=str(said.get("code", "")),
        kinds=tuple(kinds),
        cells=cells,
        schedules=int(str(said.get("schedules", 0))),
        cpu_s=float(str(said.get("cpu_s", 0.0))),
        total_cpu_s=answer.total_cpu_s,
        note=str(said.get("broken", "")),
    )
