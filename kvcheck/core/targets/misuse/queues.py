"""Misuse of schedulers: requests that can never fit, and agreements of another length than what they are about.

Invariants:
- The schedulers take requests and are never stepped, so they need no decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from kvcheck.core.base.errors import InternalError, LengthMismatch
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.scheduler.parts import SchedulerDeps
from kvcheck.core.cache.scheduler.prefill import PrefillScheduler
from kvcheck.core.cache.scheduler.request import Request, SchedulerConfig
from kvcheck.core.cache.scheduler.scheduler import Scheduler
from kvcheck.core.cache.transfer.metadata import MetadataRow
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.ends import Ends
from kvcheck.core.targets.misuse.scene import LONGEST, Scene, varied

CONFIG = SchedulerConfig(max_running=1)
LARGE, SMALL = "a large pool", "a pool of fewer pages than its longest request"


class NoDecoder:
    """The decoder of schedulers that compute nothing."""

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        raise InternalError("a scheduler that is only given requests was stepped")

    def collect(self) -> tuple[int, ...]:
        raise InternalError("a scheduler that is only given requests was stepped")

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        raise InternalError("a scheduler that is only given requests was stepped")

    def join(self, request_id: int, row: MetadataRow) -> None:
        raise InternalError("a scheduler that is only given requests was stepped")


class Queues:
    """Schedulers over the scene's pool, and over one that has fewer pages than its longest request. ends: of a pair;
    None: one engine does both."""

    def __init__(self, scene: Scene, ends: Ends | None) -> None:
        self.scene, self.ends = scene, ends
        small = scene.make_pool(varied(scene.sizes, pages=LONGEST - 1, window_pages=LONGEST - 1))
        self.pools: dict[str, KVPool] = {LARGE: scene.pool, SMALL: small}
        self.most = {LARGE: LONGEST * scene.page, SMALL: (LONGEST - 1) * scene.page}

    def scheduler(self, pool: str) -> Scheduler:
        """A new scheduler that prefills for itself, or of a decode rank."""
        return self.scene.parts.scheduler(self._deps(pool), CONFIG) if self.ends is None else self.decode(pool)

    def decode(self, pool: str) -> DecodeScheduler:
        """A new scheduler of a decode rank."""
        assert self.ends is not None
        slots, receiver = self.ends.slots, self.ends.receiver
        return self.scene.parts.decode_scheduler(
            self._deps(pool), CONFIG, metadata=slots, receiver=receiver, room_of=int
        )

    def prefill(self, pool: str) -> PrefillScheduler:
        """A new scheduler of a prefill rank."""
        assert self.ends is not None
        slots, sender, backend = self.ends.metadata["prefill"], self.ends.sender, self.scene.backend
        return PrefillScheduler(self.pools[pool], slots, NoDecoder(), sender, backend, CONFIG, room_of=int)

    def _deps(self, pool: str) -> SchedulerDeps:
        return SchedulerDeps(
            backend=self.scene.backend,
            pool=self.pools[pool],
            offload=self.scene.offload,
            cache=None,
            decoder=NoDecoder(),
        )


def _submit(pool: str, more: int) -> Callable[[Queues], object]:
    """A prompt and one output token, so many tokens longer together than the longest request."""

    def call(queues: Queues) -> bool:
        scheduler = queues.scheduler(pool)
        scheduler.submit(Request(99, np.zeros(queues.most[pool] + more - 1, dtype=np.int64), 1))
        return not scheduler.is_idle

    return call


def _prefill(pool: str, more: int) -> Callable[[Queues], object]:
    """A prompt so many tokens longer than the longest request."""

    def call(queues: Queues) -> bool:
        scheduler = queues.prefill(pool)
        scheduler.submit(Request(99, np.zeros(queues.most[pool] + more, dtype=np.int64), 1))
        is_right = not scheduler.is_idle
        scheduler.sender.close(99)
        return is_right

    return call


SUBMITS: tuple[Misuse[Queues], ...] = (
    *(
        Misuse(f"a request of one token more than fits into {pool}", LengthMismatch, _submit(pool, 1))
        for pool in (LARGE, SMALL)
    ),
    *(Misuse(f"the longest request that fits into {pool}", None, _submit(pool, 0)) for pool in (LARGE, SMALL)),
)
PREFILLS: tuple[Misuse[Queues], ...] = (
    *(
        Misuse(f"a prompt of one token more than fits into {pool}", LengthMismatch, _prefill(pool, 1))
        for pool in (LARGE, SMALL)
    ),
    *(Misuse(f"the longest prompt that fits into {pool}", None, _prefill(pool, 0)) for pool in (LARGE, SMALL)),
    # ValueError: that all values of an agreement are used is stated by a strict zip.
    Misuse("a decode rank with one agreed value too many", ValueError, lambda queues: queues.decode(LARGE).settle([1])),
    Misuse(
        "a prefill rank with one agreed value too many", ValueError, lambda queues: queues.prefill(LARGE).settle([1])
    ),
)


def queue_attempts(scene: Scene, ends: Ends | None) -> list[Attempt]:
    """Of schedulers."""
    rows = SUBMITS if ends is None else (*SUBMITS, *PREFILLS)
    return on_each(rows, Queues(scene, ends), lambda queues: queues.scene.kept())
