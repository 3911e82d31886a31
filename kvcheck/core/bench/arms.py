"""Arms and points: an arm is one way to do the work, with memory of its own; a point compares arms at one size.

    case "metadata-read"  ->  point "row"  ->  arms         ten-views (A), ten-views again (A'), ten-clones, packed-get
                                               comparisons  packed-get to ten-views, packed-get to ten-clones

Invariants:
- A maker gives its arm fresh memory at each call. Two arms never share a buffer.
- The first arm of a point is its baseline A, and the only one that is run a second time as A'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import InternalError, WrongOutput
from kvcheck.core.base.record import ADDED_ARM
from kvcheck.core.bench.clock import nothing
from kvcheck.core.bench.memory import FreshMemory
from kvcheck.core.cache.pools.shape import ModelShape

CONTROL = "A'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """check: raises WrongOutput unless the last call left the right bytes, once its lanes are joined. clock: on a
    device, "wall" (the process waits for it) or "events"."""

    call: Callable[[], object]
    check: Callable[[], None]
    clock: str = "wall"
    close: Callable[[], None] = nothing


Maker = Callable[[FreshMemory], Arm]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmComparison:
    """limit: the arm that measures the machine's maximum. name: the arm's name in the row if it has several
    baselines."""

    arm: str
    baseline: str
    limit: str | None = None
    name: str = ""

    @property
    def is_extra(self) -> bool:
        return self.name.startswith(ADDED_ARM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A case at one size. bytes: moved by one call; None if not meaningful."""

    case: str
    size: str
    shape: str | None
    bytes: int | None
    makers: Mapping[str, Maker]
    comparisons: tuple[ArmComparison, ...]
    note: str | None = None

    def __post_init__(self) -> None:
        named = {name for row in self.comparisons for name in (row.arm, row.baseline, row.limit) if name is not None}
        if not self.comparisons or named - set(self.makers) or CONTROL in self.makers:
            raise InternalError(f"{self.case}/{self.size}: compares {sorted(named)} and makes {list(self.makers)}")

    @property
    def baseline(self) -> str:
        return next(iter(self.makers))


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSetting:
    shape: ModelShape
    device: str

    @property
    def kind(self) -> str:
        return kind_of(self.device)


Case = Callable[[BenchSetting], tuple[Point, ...]]


def same(what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
    """Raise WrongOutput unless two tensors are equal in shape, type and every bit."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise WrongOutput(
            f"{what}: expected {expected.dtype}{[*expected.shape]}, got {got.dtype}{[*got.shape]}; it has no price"
        )
    if not torch.equal(got, expected.to(got.device)):
        wrong = int((got != expected.to(got.device)).sum())
        raise WrongOutput(f"{what}: {wrong} of {expected.numel()} values are wrong; a wrong output has no price")
