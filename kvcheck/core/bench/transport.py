"""What the engine's process, checks and framing cost: its throughput beside a bare loop of the library.

Invariants:
- Ways are compared within a round: each sends the same blocks to the same peer, in an order drawn anew, so that a busy
  machine slows all of them.
- Every byte between the first block and the last is compared after every run, outside the timed region; wrong bytes
  have no price.
- Runs are short and many: what slows the machine down for longer then slows all ways of a round.
- Blocks have gaps between them, so that merging neighbours helps nobody.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from kvcheck.core.bench.bare_engine import BareEngine
from kvcheck.core.errors import TransferError, UsageError
from kvcheck.core.transfer.engine import CALLS_AHEAD, MooncakeEngine, PeerInfo, Ticket
from kvcheck.core.transfer.engine_plan import Batch
from kvcheck.core.transfer.shared_memory import SharedRegion

KIB, MIB = 1 << 10, 1 << 20
GAP_BYTES = 4 * KIB
UNTOUCHED = 0xA5
BARE = "bare"


@dataclass(frozen=True, slots=True)
class RunShape:
    """What one timed run sends: `batches` times `blocks` blocks of `block_bytes`."""

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
        """Bytes of a region that a run's blocks and gaps lie in."""
        return self.blocks * self.batches * (self.block_bytes + GAP_BYTES)


SHAPES = (
    RunShape(64 * KIB, 16, 8),
    RunShape(64 * KIB, 64, 4),
    RunShape(256 * KIB, 4, 8),
    RunShape(256 * KIB, 16, 4),
    RunShape(MIB, 1, 8),
    RunShape(MIB, 16, 1),
    RunShape(4 * MIB, 1, 4),
    RunShape(4 * MIB, 8, 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of each way over one shape, in the order they ran."""

    shape: RunShape
    seconds: dict[str, float]

    def ratio(self, way: str) -> float:
        """Throughput of `way` as a share of the bare loop's."""
        return self.seconds[BARE] / self.seconds[way]


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """Over the rounds of one shape and way. ratio: to the bare loop of the same round, 1.0 is as fast.

    fastest_ratio: of the fastest run of each; other work only ever adds time, so these saw the least of it.
    """

    shape: RunShape
    way: str
    rounds: int
    median_ratio: float
    least_ratio: float
    most_ratio: float
    fastest_ratio: float
    median_gb_s: float
    bare_gb_s: float


def measure(
    *, shapes: Sequence[RunShape] = SHAPES, rounds: int = 25, seed: int = 0
) -> tuple[tuple[Round, ...], tuple[Price, ...]]:
    """All rounds, and the price of each way over each shape.

    Ways: "write" waits for each batch before it plans the next; "submit" plans as many ahead as the engine
    process is given at once.
    """
    if rounds < 1 or not shapes:
        raise UsageError(f"transport: expected rounds and shapes, got {rounds} and {len(shapes)}")
    random = np.random.default_rng(seed)
    size = max(shape.spread_bytes for shape in shapes)
    with ExitStack() as stack:
        source = stack.enter_context(SharedRegion("source", size))
        target = stack.enter_context(SharedRegion("target", size))
        source.bytes_view().numpy()[:] = np.frombuffer(random.bytes(size), dtype=np.uint8)
        peer = stack.enter_context(MooncakeEngine.start({"target": target})).info
        bare = stack.enter_context(BareEngine.start({"source": source}))
        engine = stack.enter_context(MooncakeEngine.start({"source": source}))
        ways: dict[str, Callable[[Sequence[Batch]], float]] = {
            BARE: lambda batches: bare.run(peer, batches),
            "write": lambda batches: _write(engine, peer, batches),
            "submit": lambda batches: _submit(engine, peer, batches),
        }
        done: list[Round] = []
        for number in range(rounds + 1):  # the first makes connections and faults pages in, and is not counted
            for shape in shapes:
                seconds = _round(shape, ways, source.bytes_view(), target.bytes_view(), random)
                if number:
                    done.append(Round(shape=shape, seconds=seconds))
    return tuple(done), tuple(price(done, shape, way) for shape in shapes for way in ways if way != BARE)


def price(rounds: Sequence[Round], shape: RunShape, way: str) -> Price:
    """Median and range over the rounds of `shape`."""
    mine = [each for each in rounds if each.shape == shape]
    ratios = [each.ratio(way) for each in mine]
    gb = shape.size_bytes / 1e9
    return Price(
        shape=shape,
        way=way,
        rounds=len(mine),
        median_ratio=statistics.median(ratios),
        least_ratio=min(ratios),
        most_ratio=max(ratios),
        fastest_ratio=min(each.seconds[BARE] for each in mine) / min(each.seconds[way] for each in mine),
        median_gb_s=gb / statistics.median(each.seconds[way] for each in mine),
        bare_gb_s=gb / statistics.median(each.seconds[BARE] for each in mine),
    )


def _round(
    shape: RunShape,
    ways: dict[str, Callable[[Sequence[Batch]], float]],
    source: torch.Tensor,
    target: torch.Tensor,
    random: np.random.Generator,
) -> dict[str, float]:
    batches = _batches(shape, random)
    target = target[: shape.spread_bytes]
    expected = torch.full_like(target, UNTOUCHED)
    for batch in batches:
        for start, stop, length in batch.blocks.tolist():
            expected[stop : stop + length] = source[start : start + length]
    seconds = {}
    for way in random.permutation(list(ways)).tolist():
        target.fill_(UNTOUCHED)
        seconds[way] = ways[way](batches)
        if not torch.equal(target, expected):
            wrong = int((target != expected).sum())
            raise TransferError(f"transport {way}: {wrong} of {len(target)} bytes at the receiver are wrong")
    return seconds


def _batches(shape: RunShape, random: np.random.Generator) -> list[Batch]:
    """Batches over blocks that are drawn without repetition at both ends."""
    count = shape.blocks * shape.batches
    blocks = np.empty((count, 3), dtype=np.int64)
    for column in (0, 1):
        blocks[:, column] = random.permutation(count) * (shape.block_bytes + GAP_BYTES)
    blocks[:, 2] = shape.block_bytes
    return [Batch("source", "target", part) for part in np.split(blocks, shape.batches)]


def _write(engine: MooncakeEngine, peer: PeerInfo, batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    for batch in batches:
        engine.write(peer, [batch])
    return time.perf_counter() - start


def _submit(engine: MooncakeEngine, peer: PeerInfo, batches: Sequence[Batch]) -> float:
    start = time.perf_counter()
    open_tickets: deque[Ticket] = deque()
    for batch in batches:
        open_tickets.append(engine.submit(peer, [batch]))
        if len(open_tickets) == CALLS_AHEAD:
            engine.wait(open_tickets.popleft())
    while open_tickets:
        engine.wait(open_tickets.popleft())
    return time.perf_counter() - start
