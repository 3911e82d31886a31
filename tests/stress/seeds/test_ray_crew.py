"""The adapter to Ray over a stand-in: a lost worker, a task that fails, a cluster that does not answer, no library."""

from __future__ import annotations

import dataclasses
import importlib
import json
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcheck.core.base.errors import InternalError, UnknownVerdict, UsageError
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.record import Evidence, to_plain
from kvcheck.core.run.turns import Report
from kvcheck.core.stress.seeds.batches import BatchResult, BatchTask
from kvcheck.core.stress.seeds.crew import Ended, results
from kvcheck.core.stress.seeds.ray_crew import RayCrew, load_ray, run_in_task

TASK = BatchTask(line="hicache:shape=llama-3-micro,seed=1,schedule=0", within=1)


class RayError(Exception):
    """What Ray raises for a worker or a node that is gone."""


class RayTaskError(RayError):
    """What Ray raises for an exception of the task."""


class StandIn:
    """Tasks run when they are begun; `failing` are raised in their place, once each."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, answer: Callable[[str], str], failing: list[Exception] | None = None) -> None:
        self._answer, self._failing = answer, failing or []
        self.began: dict[str, Any] = {}
        self.options: dict[str, Any] = {}
        self.cancelled = 0
        self.is_over = self.is_stuck = False

    def init(self, **settings: Any) -> None:
        self.began = settings
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def cluster_resources(self) -> dict[str, float]:
        return {"CPU": 3.0}

    def remote(self, **options: Any) -> Callable[[object], object]:
        self.options = options
        return lambda function: SimpleNamespace(remote=lambda worker, text: text)

    def wait(self, tasks: list[str], *, num_returns: int, timeout: float | None) -> tuple[list[str], list[str]]:
        return ([], tasks) if self.is_stuck else (tasks[:1], tasks[1:])

    def get(self, task: str) -> str:
        if self._failing:
            raise self._failing.pop(0)
        return self._answer(task)

    def cancel(self, task: object, *, force: bool) -> None:
        self.cancelled += force

    def shutdown(self) -> None:
        self.is_over = True


def crew_of(ray: StandIn, address: str = "auto", places: int | None = None) -> RayCrew:
    return RayCrew(address, places=places, worker="a.worker", ray=ray)  # type: ignore[arg-type]


def right() -> Callable[[str], str]:
    result = BatchResult(line=TASK.line, code=code_digest(), evidence=Evidence(schedules=1, traces=1))
    return lambda text: json.dumps({"result": to_plain(result)})


def taken(crew: RayCrew, until: float | None = None) -> list[BatchResult]:
    return [*results([TASK], crew, until=until)]


def test_a_result_comes_back_as_json() -> None:
    ray = StandIn(right())
    crew = crew_of(ray)
    assert crew.places == 3 and ray.options == {"num_cpus": 1, "max_retries": 0}
    assert "num_cpus" not in ray.began and ray.began["log_to_driver"] is False
    (result,) = taken(crew)
    assert result.evidence.traces == 1
    crew.close()
    assert ray.is_over and not ray.cancelled


def test_ray_on_this_machine_has_so_many_cpus_and_no_dashboard() -> None:
    before = signal.getsignal(signal.SIGTERM)
    ray = StandIn(right())
    crew_of(ray, "local", places=2)
    assert ray.began["num_cpus"] == 2 and ray.began["include_dashboard"] is False
    assert signal.getsignal(signal.SIGTERM) is before, "the command still ends as it says"


def test_what_a_thread_of_ray_prints_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    crew = crew_of(StandIn(right()))
    thread = threading.Thread(target=lambda: sys.stdout.write("(raylet) a worker died\n"))
    thread.start()
    thread.join()
    sys.stdout.write("a result\n")
    crew.close()
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("a result\n", "(raylet) a worker died\n")


def test_a_lost_worker_is_named_and_its_batch_runs_again() -> None:
    crew = crew_of(StandIn(right(), failing=[RayError("The worker died: SIGKILL\nlong story"), RayError("gone")]))
    crew.begin(TASK)
    assert crew.take(None) == Ended(task=TASK, lost="RayError: The worker died: SIGKILL", ran=TASK.line)
    (found,) = taken(crew)
    assert not found.findings and found.evidence.schedules == 1


@pytest.mark.parametrize(
    ("failing", "answer", "raised", "says"),
    [
        ([RayTaskError("x\nModuleNotFoundError: kvcheck")], right(), UnknownVerdict, "ModuleNotFoundError: kvcheck"),
        ([], lambda text: Report(error="bad line", exit_code=2).line(), UsageError, "bad line"),
        ([], lambda text: Report(error="no memory", exit_code=4).line(), UnknownVerdict, "no memory"),
        ([], lambda text: Report(error="bug", exit_code=70).line(), InternalError, "bug"),
    ],
)
def test_the_error_of_a_task_is_raised_here(
    failing: list[Exception], answer: Callable[[str], str], raised: type[Exception], says: str
) -> None:
    with pytest.raises(raised, match=says):
        taken(crew_of(StandIn(answer, failing)))


def test_time_that_is_up_ends_what_is_under_way() -> None:
    ray = StandIn(right())
    ray.is_stuck = True
    crew = crew_of(ray)
    assert taken(crew, until=time.monotonic() + 60) == []
    crew.close()
    assert ray.cancelled == 1 and ray.is_over


def test_a_cluster_that_does_not_answer_is_one_line() -> None:
    ray = StandIn(right())
    ray.init = lambda **settings: (_ for _ in ()).throw(ConnectionError("nobody\nthere"))  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=r"--ray auto: no cluster answers there: nobody; expected local"):
        crew_of(ray, "auto")


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_dead_address_is_not_looked_for_by_ray(address: str) -> None:
    ray = StandIn(right())
    ray.init = lambda **settings: pytest.fail("Ray would wait for minutes")  # type: ignore[method-assign]
    with pytest.raises(UsageError, match=f"--ray {address}: no cluster answers there: .*Connection refused"):
        crew_of(ray, address)


def test_a_missing_library_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise ImportError("No module named 'ray'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(UnknownVerdict, match=r"No module named 'ray'; next: pip install 'kvcheck\[ray\]'"):
        load_ray()


@pytest.mark.schedules
def test_a_task_runs_a_batch_and_returns_its_error() -> None:
    text = json.dumps(to_plain(dataclasses.replace(TASK, line=TASK.line.replace("hicache", "nowhere"))))
    answer = run_in_task("kvcheck.commands.worker", text)
    assert '"exit_code": 2' in answer and "nowhere" in answer
