"""The queue of one engine: nobody waits for another request's store, and urgent ones go first."""

from __future__ import annotations

from dataclasses import replace

from cache.hicache.test_hicache_life import HeldBack

from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.memory_store import MemoryStore
from kvcheck.core.stress.history import History, OperationEvents
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.scenarios.serving import make_setup, request_of
from kvcheck.core.stress.targets.builtin import BuiltinEngine
from kvcheck.core.stress.targets.parts import FIXED
from kvcheck.core.stress.targets.target import HostTier
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.shapes import shape

SHAPE = shape("llama-3-tiny")
PAGE = SHAPE.page_size


def job(request: int, *runs: tuple[int, int]) -> Job:
    return Job(
        request=request,
        arrival=0,
        prompt_tokens=sum(tokens for _, tokens in runs),
        output_tokens=3,
        blocks=runs,
        wants_logprobs=False,
        speculative=False,
        wants_hidden=False,
    )


JOBS = (
    job(1, (1, 3 * PAGE + 1)),
    job(2, (1, 3 * PAGE), (2, 1)),
    job(3, (3, PAGE + 1)),
    job(4, (4, PAGE + 1)),
    job(5, (1, 3 * PAGE), (5, 1)),
    *(job(request, (1, 2 * PAGE), (request, PAGE + 1)) for request in range(6, 16)),
)


def engine_of(pages: int = 60) -> BuiltinEngine:
    """An engine whose store alone has the prompt of request 1, and answers nobody who does not wait for it."""
    history, chooser = History(), HeldBack("storage")
    load = Load(jobs=JOBS, capacity_tokens=pages * PAGE, max_running=6, chunk_tokens=2 * PAGE, note="")
    backend = SimulatedBackend(chooser, OperationEvents(history.emit))
    units = {"full": pages, "window": 0, "state": 0}
    engine = BuiltinEngine(
        FIXED, make_setup(SHAPE, load, backend, history.emit, host=HostTier(units=units, store=MemoryStore()))
    )
    engine.submit(request_of(JOBS[0]))
    while not engine.is_idle:
        engine.step()
    assert engine.cache is not None
    engine.cache.settle()
    engine.cache.evict("full", pages)
    engine.cache.residency.evict_host("full", pages)
    assert [*engine.cache.tree.nodes()] == []
    return engine


def states(engine: BuiltinEngine) -> dict[int, str]:
    return engine.scheduler.states()


def served(engine: BuiltinEngine) -> tuple[list[int], list[int]]:
    """Step to the end: requests in the order in which they were admitted, and in which they ended."""
    admitted, finished = list[int](), list[int]()
    while not engine.is_idle:
        report = engine.step()
        admitted += report.admitted
        finished += [request for request, _ in report.finished]
    engine.close()
    return admitted, finished


def test_a_request_that_waits_for_the_store_holds_up_nobody() -> None:
    engine = engine_of()
    for each in JOBS[1:4]:
        engine.submit(request_of(each))
    engine.step()
    assert states(engine)[2] == "fetching" and states(engine)[3] != "waiting"
    assert served(engine) == ([2], [3, 4, 2])


def test_it_keeps_its_place_among_those_that_wait() -> None:
    engine = engine_of()
    engine.submit(request_of(JOBS[1]))
    engine.step()
    for each in JOBS[4:7]:
        engine.submit(request_of(each))
    admitted, _ = served(engine)
    assert admitted == [2, 5, 6, 7]


def test_no_more_requests_fetch_than_may_be_computed_together() -> None:
    engine = engine_of()
    for each in JOBS[4:]:
        engine.submit(request_of(each))
    engine.submit(request_of(JOBS[2]))
    engine.scheduler._admit()
    most = engine.scheduler.config.max_prefilling
    assert [*states(engine).values()].count("fetching") == most < len(JOBS[4:])
    assert sorted(served(engine)[0]) == [3, *range(5, 16)]


def test_an_urgent_request_goes_first_and_waits_for_no_store() -> None:
    engine = engine_of()
    for each in JOBS[1:4]:
        engine.submit(request_of(each))
    for each in JOBS[4:6]:
        engine.submit(replace(request_of(each), is_urgent=True))
    assert [*states(engine)] == [5, 6, 2, 3, 4]
    report = engine.step()
    assert report.admitted[:2] == [5, 6] and "fetching" not in (states(engine).get(5), states(engine).get(6))
    served(engine)
