"""What schedulers stand on in tests of single rounds: passes that are over at once, and a cache that notes what it is
asked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import numpy as np
import torch

from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.hicache.cache import HiCache, Lease
from kvcheck.core.cache.hicache.node import Transfer
from kvcheck.core.cache.hicache.radix_tree import PrefixTree
from kvcheck.core.cache.offload import Offload
from kvcheck.core.cache.pools.pool import Given, Holding, KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.request import Request, Tokens
from kvcheck.core.cache.transfer.metadata import MetadataRow

FIRST, SECOND, THIRD = 11, 12, 13
"""Requests, and their rooms where they have one."""


def request(number: int, tokens: int, *, outputs: int = 1, attempt: int = 0) -> Request:
    return Request(number, np.zeros(tokens, dtype=np.int64), outputs, attempt=attempt)


class ZeroDecoder:
    """Each pass is over when it is queued, and its tokens are 0."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._count = 0

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        self._count = len(chunks)
        done = self._pool.backend.signal()
        self._pool.backend.record(done, lane=self._pool.forward)
        return done

    def collect(self) -> tuple[int, ...]:
        return (0,) * self._count

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        return {"output_ids": torch.zeros(1, dtype=torch.int32)}

    def join(self, request_id: int, row: MetadataRow) -> None:
        """The next pass samples 0."""


class BareCache:
    """A cache that holds nothing. fetching: requests whose pages come from the store for ever. loading: requests of
    which the host has pages, which are there at once."""

    def __init__(self, page_size: int, *, fetching: Iterable[int] = (), loading: Iterable[int] = ()) -> None:
        self.fetched: list[tuple[int, int]] = []
        self.admitted: list[tuple[int, int]] = []
        self.kept: list[int] = []
        self.fetching, self._loading = set(fetching), set(loading)
        self._root = PrefixTree(page_size).root

    def fetch(self, tokens: Tokens, request: int) -> bool:
        self.fetched.append((request, len(tokens)))
        return request not in self.fetching

    def is_fetching(self, request: int) -> bool:
        return request in self.fetching and any(request == each for each, _ in self.fetched)

    def admit(self, tokens: Tokens, holding: Holding, *, priority: int = 0) -> Lease:
        self.admitted.append((holding.request, len(tokens)))
        load = Transfer(
            number=1, kind="load", request=holding.request, nodes=[], copies=(), lock=self._root, producer=0
        )
        loads = [load] if holding.request in self._loading else []
        return Lease(node=self._root, holding=holding, priority=priority, loads=loads)

    def keep(self, lease: Lease, tokens: Tokens) -> None:
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


def deps(pool: KVPool, cache: BareCache | None = None) -> SchedulerDeps:
    """What a scheduler over the pool stands on."""
    return SchedulerDeps(
        backend=pool.backend,
        pool=pool,
        offload=Offload(pool, pool.backend),
        cache=cast(HiCache | None, cache),
        decoder=ZeroDecoder(pool),
    )
