"""Who runs batches: what becomes of a batch whose process died, and of a worker with another kvcheck."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import Evidence
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.campaign.batches import Batch, BatchResult
from kvcheck.core.stress.campaign.crew import LOSSES, Done, Lost, results


class Actors:
    """Two places. Batches of the schedules in `dying` end their process so many times."""

    places = 2
    has_begun = True

    def __init__(self, dying: dict[int, int] | None = None, code: str | None = None) -> None:
        self.dying, self.code = dict(dying or {}), code or code_digest()
        self.under_way: list[Batch] = []
        self.given: list[int] = []
        self.most = 0

    def give(self, batch: Batch, until: float | None) -> None:
        self.under_way.append(batch)
        self.given.append(batch.plan.schedule)
        self.most = max(self.most, len(self.under_way))

    def take(self, until: float | None) -> Done | Lost:
        batch = self.under_way.pop()  # the last one first: results come out of order
        if self.dying.get(batch.plan.schedule, 0) > 0:
            self.dying[batch.plan.schedule] -= 1
            return Lost(batch=batch, why="killed", has_begun=self.has_begun)
        if batch.plan.schedule == 99:
            return Done(batch=batch, result=None)
        evidence = Evidence(schedules=1, traces=1)
        return Done(
            batch=batch,
            result=BatchResult(at=batch.at, line=batch.line, within=1, code=self.code, evidence=evidence),
        )

    def close(self) -> None:
        return


def batches(numbers: Iterable[int]) -> list[Batch]:
    plan = Plan(scenario="hicache", shape="llama-3-micro")
    return [Batch(at=at, plan=Plan(scenario=plan.scenario, shape=plan.shape, schedule=at), within=1) for at in numbers]


def taken(crew: Actors, numbers: Iterable[int], *, enough: int = 10**9) -> list[BatchResult]:
    found: list[BatchResult] = []
    for each in results(batches(numbers), crew, until=None, is_enough=lambda: len(found) >= enough):
        found.append(each)
    return found


def test_each_batch_has_one_result_and_places_are_kept() -> None:
    crew = Actors()
    assert sorted(each.at for each in taken(crew, range(9))) == [*range(9)]
    assert crew.most == 2 and sorted(crew.given) == [*range(9)]


def test_a_batch_whose_process_died_runs_again() -> None:
    crew = Actors(dying={4: LOSSES - 1})
    found = taken(crew, range(6))
    assert sorted(each.at for each in found) == [*range(6)] and not any(each.findings for each in found)
    assert crew.given.count(4) == LOSSES


def test_a_batch_that_ends_every_process_is_a_finding_and_the_others_go_on() -> None:
    crew = Actors(dying={4: 10**9})
    found = {each.at: each for each in taken(crew, range(6))}
    assert len(found) == 6 and crew.given.count(4) == LOSSES
    (finding,) = found[4].findings
    assert finding.code == "KV902" and finding.cell == "hicache/llama-3-micro" and "killed" in finding.message
    assert not found[4].is_whole and not any(found[at].findings for at in (0, 1, 2, 3, 5))


def test_processes_in_which_kvcheck_cannot_be_loaded_are_no_finding() -> None:
    crew = Actors(dying={1: 10**9})
    crew.has_begun = False
    with pytest.raises(UnknownVerdict, match="ended while kvcheck was loaded in them; the last one: killed"):
        taken(crew, range(3))


def test_enough_ends_it_and_what_is_under_way_is_still_taken() -> None:
    crew = Actors()
    found = taken(crew, range(100), enough=5)
    assert 5 <= len(found) <= 5 + crew.places and not crew.under_way


def test_a_batch_that_the_time_cut_has_no_result() -> None:
    assert [each.at for each in taken(Actors(), [99, 1])] == [1]


def test_results_of_another_kvcheck_are_refused() -> None:
    with pytest.raises(UnknownVerdict, match="a worker runs another kvcheck"):
        taken(Actors(code="0" * 64), range(2))
