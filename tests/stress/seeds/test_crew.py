"""Crews: the fate of a batch whose process died, and of a worker with another kvcheck."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import Evidence
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.seeds.batches import BatchResult, BatchTask
from kvcheck.core.stress.seeds.crew import LOSSES, Ended, results

CUT = 99


def line_of(number: int) -> str:
    return f"hicache:shape=llama-3-micro,seed={number},schedule=0"


def number_of(task: BatchTask) -> int:
    return parse_line(task.line).seed


class Actors:
    """Two places. Batches of the seeds in `dying` end their process so many times. ran: their last schedule."""

    places = 2

    def __init__(self, dying: dict[int, int] | None = None, code: str | None = None, ran: str | None = "") -> None:
        self.dying, self.code, self.ran = dict(dying or {}), code or code_digest(), ran
        self.begun: list[BatchTask] = []
        self.under_way: list[BatchTask] = []
        self.most = 0

    def begin(self, task: BatchTask) -> None:
        self.begun.append(task)
        self.under_way.append(task)
        self.most = max(self.most, len(self.under_way))

    def take(self, until: float | None) -> Ended:
        task = self.under_way.pop()  # the last one first: results come out of order
        number = number_of(task)
        if self.dying.get(number, 0) > 0:
            self.dying[number] -= 1
            return Ended(task=task, lost="killed", ran=None if self.ran is None else self.ran or task.line)
        if number == CUT:
            return Ended(task=task)
        evidence = Evidence(schedules=1, traces=1)
        return Ended(task=task, result=BatchResult(line=task.line, code=self.code, evidence=evidence))

    def close(self) -> None:
        return


def taken(crew: Actors, numbers: Iterable[int], until: float | None = None) -> dict[int, BatchResult]:
    found = [*results([BatchTask(line=line_of(number)) for number in numbers], crew, until=until)]
    assert len({each.line for each in found}) == len(found), "a batch has one result"
    return {each.plan.seed: each for each in found}


def test_each_batch_has_one_result_and_places_are_kept() -> None:
    crew = Actors()
    assert sorted(taken(crew, range(9))) == [*range(9)]
    assert crew.most == 2 and len(crew.begun) == 9


def test_a_batch_whose_process_died_runs_again() -> None:
    crew = Actors(dying={4: LOSSES - 1})
    found = taken(crew, range(6))
    assert sorted(found) == [*range(6)] and not any(each.findings for each in found.values())
    assert [*map(number_of, crew.begun)].count(4) == LOSSES


def test_a_batch_that_ends_every_process_is_a_finding_of_its_last_schedule_and_the_others_run() -> None:
    crew = Actors(dying={4: 10**9}, ran="hicache:shape=llama-3-micro,seed=4,schedule=7")
    found = taken(crew, range(6))
    assert len(found) == 6 and [*map(number_of, crew.begun)].count(4) == LOSSES
    (finding,) = found[4].findings
    assert finding.code == "KV902" and finding.cell == "hicache/llama-3-micro" and "killed" in finding.message
    assert "seed=4,schedule=7" in finding.schedule
    assert not found[4].is_whole and not any(found[at].findings for at in (0, 1, 2, 3, 5))


def test_processes_in_which_kvcheck_cannot_be_loaded_are_no_finding() -> None:
    with pytest.raises(UnknownVerdict, match="ended while kvcheck was loaded in them; the last one: killed"):
        taken(Actors(dying={1: 10**9}, ran=None), range(3))


def test_a_batch_that_the_time_cut_has_no_result_and_none_begins_after_it() -> None:
    assert sorted(taken(Actors(), [CUT, 1])) == [1]
    crew = Actors()
    assert not taken(crew, range(3), until=time.monotonic() - 1) and not crew.begun
    taken(crew, range(3), until=time.monotonic() + 60)
    assert all(task.left_s is not None and 0 < task.left_s <= 60 for task in crew.begun)


def test_results_of_another_kvcheck_are_refused() -> None:
    with pytest.raises(UnknownVerdict, match="a worker runs another kvcheck"):
        taken(Actors(code="0" * 64), range(2))
