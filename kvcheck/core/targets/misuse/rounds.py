"""Rounds of a scheduler at the edge: who is let in, who has to wait, who comes back, and what an abort ends.

Invariants:
- Every call steps a scheduler of its own, on a pool of its own. Passes are over at once and sample token 0.
- The prefix cache of these schedulers holds nothing. What counts is what it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from kvcheck.core.cache.backend.backend import Backend, Signal
from kvcheck.core.cache.hicache.cache import HiCache, Lease
from kvcheck.core.cache.hicache.node import Transfer
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.request import Request, SchedulerConfig, Tokens
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.metadata import MetadataRow
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import PAGES, ROWS, Scene

FIRST, SECOND, THIRD = 11, 12, 13
"""Requests, and their rooms where they have one."""
ENOUGH = 12
"""Rounds in which two requests of a few tokens are served."""


class ZeroDecoder:
    """Each pass is over when it is queued, and its tokens are 0. joined: requests that came with their metadata."""

    def __init__(self, pool: KVPool) -> None:
        self._backend: Backend = pool.backend
        self._lane = pool.forward
        self._count = 0
        self.joined: list[int] = []

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        self._count = len(chunks)
        done = self._backend.signal()
        self._backend.record(done, lane=self._lane)
        return done

    def collect(self) -> tuple[int, ...]:
        return (0,) * self._count

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        return {"output_ids": torch.zeros(1, dtype=torch.int32)}

    def join(self, request_id: int, row: MetadataRow) -> None:
        """Note the request."""
        self.joined.append(request_id)


class BareCache:
    """A prefix cache without a prefix, that notes what a scheduler asks it for.

    fetching: requests for which the store has pages; they are on their way for ever. loading: requests for which the
    host has pages; they are there at once.
    """

    def __init__(self, page_size: int, *, fetching: Iterable[int] = (), loading: Iterable[int] = ()) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.admitted: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self._fetching = set(fetching)
        self._loading = set(loading)
        self._begun: set[int] = set()
        self._root = PrefixTree(page_size).root

    def fetch(self, tokens: Tokens, request: int) -> bool:
        """Note a request and how many of its tokens are looked for in the store."""
        self.fetched.append((request, len(tokens)))
        self._begun |= {request} & self._fetching
        return request not in self._fetching

    def is_fetching(self, request: int) -> bool:
        return request in self._begun

    def admit(self, tokens: Tokens, holding: Holding, *, priority: int = 0) -> Lease:
        """Note a request and how many of its tokens are looked for in the tree."""
        self.admitted.append((holding.request, len(tokens)))
        load = Transfer(
            number=1, kind="load", request=holding.request, nodes=[], copies=(), lock=self._root, producer=0
        )
        loads = [load] if holding.request in self._loading else []
        return Lease(node=self._root, holding=holding, priority=priority, loads=loads)

    def keep(self, lease: Lease, tokens: Tokens) -> None:
        """Note how many tokens the tree is offered while their request goes on."""
        self.kept.append(len(tokens))

    def finish(self, lease: Lease, tokens: Tokens) -> Given:
        return Given.nothing(len(lease.holding.pages))

    def must_defer(self, tokens: Tokens) -> bool:
        return False

    def is_loaded(self, lease: Lease) -> bool:
        return True

    def evictable(self, space: str) -> int:
        return 0

    def evict(self, space: str, count: int) -> int:
        return 0

    def wait_oldest(self) -> bool:
        return False

    def prepare(self, leases: Iterable[Lease]) -> None:
        """Nothing is loaded."""

    def poll(self) -> None:
        """Nothing can have come."""

    def start_loads(self) -> None:
        """Nothing is queued."""


def request(number: int, tokens: int, *, outputs: int = 1, attempt: int = 0) -> Request:
    """A request with a prompt of so many tokens."""
    return Request(number, np.zeros(tokens, dtype=np.int64), outputs, attempt=attempt)


def deps(scene: Scene, pool: KVPool, cache: BareCache | None = None) -> SchedulerDeps:
    """What a scheduler over a pool of the scene's kind stands on."""
    return SchedulerDeps(
        backend=pool.backend,
        pool=pool,
        offload=scene.parts.offload(pool, pool.backend),
        cache=cast(HiCache | None, cache),
        decoder=ZeroDecoder(pool),
    )


def _scheduler(scene: Scene, *prompts: int, outputs: int = 1, cache: BareCache | None = None, **most: int) -> Scheduler:
    """A scheduler that was given prompts of so many tokens. most: settings."""
    config = SchedulerConfig(**({"max_running": 1} | most))  # type: ignore[arg-type]
    scheduler = scene.parts.scheduler(deps(scene, scene.make_pool(scene.sizes), cache), config)
    for number, tokens in enumerate(prompts, FIRST):
        scheduler.submit(request(number, tokens, outputs=outputs))
    return scheduler


def _most_prefilling(scene: Scene) -> bool:
    """Where two prompts may be prefilled together, a third one waits."""
    return _scheduler(scene, 1, 1, 1, max_prefilling=2).step().admitted == [FIRST, SECOND]


def _most_running(scene: Scene) -> bool:
    """Where one request may run, a second one waits for it."""
    return _scheduler(scene, 1, 1, outputs=3).step().joined == [FIRST]


def _all_rows(scene: Scene) -> bool:
    """As many requests are let in as the pool has rows, and no other."""
    scheduler = _scheduler(scene, *[1] * (ROWS + 1), max_prefilling=ROWS + 1)
    return scheduler.step().admitted == [*range(FIRST, FIRST + ROWS)]


def _all_pages(scene: Scene) -> bool:
    """Two prompts that with their first tokens fill three pages each, and one that fills the seventh page."""
    assert PAGES == 7
    longest = 3 * scene.page - 1
    return _scheduler(scene, longest, longest, scene.page - 1).step().admitted == [FIRST, SECOND, THIRD]


def _abort_waiting(scene: Scene) -> bool:
    """A request that waits is ended at once, and once."""
    scheduler = _scheduler(scene, 1)
    return scheduler.abort(FIRST) and scheduler.is_idle and not scheduler.abort(FIRST)


def _resume_beside(scene: Scene) -> bool:
    """A retracted request comes back beside one that runs, where there is a place and room."""
    scheduler = _scheduler(scene, 1, 1, outputs=4, max_running=2)
    scheduler.step()
    return scheduler.preempt(FIRST) and scheduler.step().resumed == [FIRST]


def _resume_behind(scene: Scene) -> bool:
    """Where one request may run, a retracted one comes back when the one that took its place has ended."""
    scheduler = _scheduler(scene, 1, 1, outputs=5, resume_delay=2)
    scheduler.step()
    if not scheduler.preempt(FIRST):
        return False
    events: list[str] = []
    for report in (scheduler.step() for _ in range(ENOUGH)):
        events += [f"{number} resumed" for number in report.resumed]
        events += [f"{number} ended" for number, _ in report.finished]
    return events == [f"{SECOND} ended", f"{FIRST} resumed", f"{FIRST} ended"] and scheduler.is_idle


def _most_fetching(scene: Scene) -> bool:
    """Where two prompts may be prefilled together, pages are fetched for two that wait."""
    cache = BareCache(scene.page, fetching=(FIRST, SECOND, THIRD))
    _scheduler(scene, 1, 1, 1, cache=cache, max_prefilling=2).step()
    return {number for number, _ in cache.fetched} == {FIRST, SECOND}


def _past_fetching(scene: Scene) -> bool:
    """A prompt of which the store has nothing goes past one whose pages are on their way."""
    cache = BareCache(scene.page, fetching=(FIRST,))
    return _scheduler(scene, 1, 1, cache=cache, max_prefilling=2).step().admitted == [SECOND]


def _told_loading(scene: Scene) -> bool:
    """Of two prompts, the one that has a part loaded is reported as loading."""
    cache = BareCache(scene.page, loading=(SECOND,))
    report = _scheduler(scene, 1, 1, cache=cache, max_prefilling=2).step()
    return report.admitted == [FIRST, SECOND] and report.loading == [SECOND]


def _whole_pages(scene: Scene) -> bool:
    """Of a prompt of two pages and a token, the last token is computed, and both pages are looked for."""
    cache = BareCache(scene.page)
    _scheduler(scene, 2 * scene.page + 1, outputs=1, cache=cache, chunk_tokens=scene.page).step()
    asked = [(FIRST, 2 * scene.page)]
    return cache.fetched == asked and cache.admitted == asked


def _kept_prompt(scene: Scene) -> bool:
    """A prompt of whole pages is offered to the tree before its request ends."""
    cache = BareCache(scene.page)
    prompt = 2 * scene.page if scene.page > 2 else scene.page  # three more tokens have to fit into LONGEST pages
    scheduler = _scheduler(scene, prompt, outputs=3, cache=cache, chunk_tokens=2 * scene.page)
    scheduler.step()
    return not scheduler.is_idle and cache.kept == [prompt]


ROUNDS: tuple[Misuse[Scene], ...] = (
    Misuse("one prompt more than may be prefilled together", None, _most_prefilling),
    Misuse("one request more than may run together", None, _most_running),
    Misuse("as many requests as there are rows, and one more", None, _all_rows),
    Misuse("prompts that just fill all pages", None, _all_pages),
    Misuse("abort of a request that waits", None, _abort_waiting),
    Misuse("resume beside a request that runs", None, _resume_beside),
    Misuse("resume when as many run as may", None, _resume_behind),
    Misuse("one fetch more than may be prefilled together", None, _most_fetching),
    Misuse("a prompt behind one that is fetched", None, _past_fetching),
    Misuse("a prompt of which a part is loaded", None, _told_loading),
    Misuse("the tokens that are looked for", None, _whole_pages),
    Misuse("the tokens that are offered", None, _kept_prompt),
)


def round_attempts(scene: Scene) -> list[Attempt]:
    """Of a scheduler."""
    return on_each(ROUNDS, scene, Scene.kept)
