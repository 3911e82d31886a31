"""Case: throughput of the transfer engine in its own process, with checks, compared with a bare library loop.

Engines and their registered regions are started once for all rounds, which takes seconds. In every round each arm gets
its own blocks at random places, in a section of the regions that another arm used before.

Invariants:
- Every byte between an arm's first block and its last is compared, outside the timed region. An arm with wrong bytes
  has no price.
- Blocks have gaps between them, so that no arm gains by merging neighbours.
- The bare loop is timed in its own process, so its time has no message, check or framing in it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.private_network import PrivateNetwork
from kvcheck.core.bench.arms import Arm, Comparison, Point, Setting, same
from kvcheck.core.bench.bare_engine import BareEngine
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.backend.shared_memory import SharedRegion
from kvcheck.core.cache.transfer.mooncake.engine import CALLS_AHEAD, MooncakeEngine, PeerInfo, Submission
from kvcheck.core.cache.transfer.mooncake.library import require_library
from kvcheck.core.cache.transfer.mooncake.plan import Batch

KIB, MIB = 1 << 10, 1 << 20
GAP_BYTES = 4 * KIB
UNTOUCHED = 0xA5
BARE = "bare-loop"
WAYS_OF_A_ROUND = 4
"""The bare loop, the bare loop again, and two ways of the engine."""


@dataclass(frozen=True, slots=True)
class RunShape:
    """The size of one timed run: `batches` times `blocks` blocks of `block_bytes`."""

    block_bytes: int
    blocks: int
    batches: int

    def __post_init__(self) -> None:
        if min(self.block_bytes, self.blocks, self.batches) < 1:
            raise UsageError(f"transport run: every number has to be positive, got {self}")

    @property
    def size_bytes(self) -> int:
        """Bytes of a run."""
        return self.block_bytes * self.blocks * self.batches

    @property
    def spread_bytes(self) -> int:
        """Bytes of a region that a run's blocks and gaps take."""
        return self.blocks * self.batches * (self.block_bytes + GAP_BYTES)


SHAPES = (
    RunShape(64 * KIB, 16, 8),
    RunShape(256 * KIB, 16, 4),
    RunShape(MIB, 16, 1),
    RunShape(4 * MIB, 8, 1),
)


def points(setting: Setting) -> tuple[Point, ...]:
    """The transfer engine in its own process, checked, compared with a bare loop of its library."""
    return points_of(setting, SHAPES)


def points_of(setting: Setting, shapes: Sequence[RunShape]) -> tuple[Point, ...]:
    """A point for each size of run. Raises UnknownVerdict if the library is missing."""
    require_library()
    if setting.kind != "cpu":
        raise UnknownVerdict("transport: measured between host regions only; next: --device cpu")
    rig = _Rig(setting, max(shape.spread_bytes for shape in shapes))
    return tuple(
        Point(
            case="transport",
            size=f"{shape.batches}x{shape.blocks}x{shape.block_bytes >> 10} KiB",
            shape=None,
            bytes=shape.size_bytes,
            makers={
                BARE: partial(rig.arm, shape, rig.bare_run, "own"),
                "write": partial(rig.arm, shape, rig.write, "wall"),
                "submit": partial(rig.arm, shape, rig.submit, "wall"),
            },
            comparisons=tuple(Comparison(arm=way, baseline=BARE, limit=BARE) for way in ("write", "submit")),
            note="TCP on one machine; batches x blocks x size; the bare loop is timed inside its own process",
        )
        for shape in shapes
    )


class _Rig:
    """Three engine processes over two regions, and the sections of the regions that arms use in turn."""

    def __init__(self, setting: Setting, spread: int) -> None:
        self._spread = spread
        stack = setting.stack
        self._source = stack.enter_context(SharedRegion("source", spread * WAYS_OF_A_ROUND))
        self._target = stack.enter_context(SharedRegion("target", spread * WAYS_OF_A_ROUND))
        network = stack.enter_context(PrivateNetwork()).path
        target, source = {"target": self._target}, {"source": self._source}
        self._peer: PeerInfo = stack.enter_context(MooncakeEngine.start(target, network=network)).info
        self._bare = stack.enter_context(BareEngine.start(source, network=network))
        self._engine = stack.enter_context(MooncakeEngine.start(source, network=network))
        self._parts: Iterator[int] = itertools.cycle(range(WAYS_OF_A_ROUND))

    def arm(self, shape: RunShape, run: Callable[[Sequence[Batch]], object], clock: str, memory: FreshMemory) -> Arm:
        """An arm with its own blocks."""
        start = next(self._parts) * self._spread
        source, target = (
            region.bytes_view()[start : start + shape.spread_bytes] for region in (self._source, self._target)
        )
        source.copy_(memory.empty((shape.spread_bytes,), torch.uint8))
        target.fill_(UNTOUCHED)
        batches = _batches(shape, memory.random, start)

        def check() -> None:
            expected = torch.full_like(target, UNTOUCHED)
            for batch in batches:
                for mine, theirs, length in (batch.blocks - [start, start, 0]).tolist():
                    expected[theirs : theirs + length] = source[mine : mine + length]
            same("bytes at the receiver", target, expected)

        return Arm(call=lambda: run(batches), check=check, clock=clock)

    def bare_run(self, batches: Sequence[Batch]) -> int:
        """One call for each batch. Returns the nanoseconds that the engine process measured."""
        return round(self._bare.run(self._peer, batches) * 1e9)

    def write(self, batches: Sequence[Batch]) -> None:
        """Plan and write one batch at a time, and wait for each."""
        for batch in batches:
            self._engine.write(self._peer, [batch])

    def submit(self, batches: Sequence[Batch]) -> None:
        """Plan as many batches ahead as the engine process takes at once."""
        open_submissions: deque[Submission] = deque()
        for batch in batches:
            open_submissions.append(self._engine.submit(self._peer, [batch]))
            if len(open_submissions) == CALLS_AHEAD:
                self._engine.wait(open_submissions.popleft())
        while open_submissions:
            self._engine.wait(open_submissions.popleft())


def _batches(shape: RunShape, random: np.random.Generator, start: int) -> list[Batch]:
    """Batches over random blocks, each used once at both ends, from offset `start` on."""
    count = shape.blocks * shape.batches
    blocks = np.empty((count, 3), dtype=np.int64)
    for column in (0, 1):
        blocks[:, column] = start + random.permutation(count) * (shape.block_bytes + GAP_BYTES)
    blocks[:, 2] = shape.block_bytes
    return [Batch("source", "target", part) for part in np.split(blocks, shape.batches)]
