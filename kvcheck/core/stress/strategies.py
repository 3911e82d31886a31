"""Strategies: choosers of the next chunk, for the simulated backend.

Invariants:
- A strategy is a function of its seed and of the choices offered; it sees names, never memory or time.
"""

from __future__ import annotations

import base64
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.registry import Registry
from kvcheck.core.base.rng import Rng
from kvcheck.core.cache.backend.backend import Lane
from kvcheck.core.cache.backend.simulated import Choice, Chooser, Goal, Pending

_PAIR = re.compile(r"([1-9][0-9]{0,11})\.([^~]{1,80})~([1-9][0-9]{0,11})\.([^~]{1,80})")
STRATEGIES: Registry[Callable[[Draw], Chooser]] = Registry(
    "strategy",
    {
        "portfolio": (
            "kvcheck.core.stress.strategies:portfolio",
            "Runs eager, lazy and random in turn, then each delay once, with answers and random ones in between.",
        ),
        "eager": ("kvcheck.core.stress.strategies:eager", "Runs every operation as soon as it can run, oldest first."),
        "lazy": (
            "kvcheck.core.stress.strategies:lazy",
            "Runs nothing until the process waits for it; then the youngest lane goes first.",
        ),
        "delay": (
            "kvcheck.core.stress.strategies:delay",
            "Runs one group of lanes, or all groups, only when nothing else can run; each schedule delays another.",
        ),
        "random": (
            "kvcheck.core.stress.strategies:seeded_random",
            "Picks the next operation at random; seed and schedule number fix the picks.",
        ),
        "answers": (
            "kvcheck.core.stress.answers:answers",
            "Runs only what the process asks for or waits for; chance picks the questions that are asked too early.",
        ),
        "replay": ("kvcheck.core.stress.strategies:replay", "Follows the choices that a schedule line recorded."),
        "flip": (
            "kvcheck.core.stress.strategies:flip",
            "Runs two operations that a schedule line names in the other order.",
        ),
    },
)
LANE_GROUPS: dict[str, tuple[str, ...]] = {
    "compute": ("forward",),
    "d2h": ("d2h", "hicache.d2h"),
    "h2d": ("h2d", "hicache.h2d"),
    "storage": ("storage",),
    "wire": ("ordered", "async.kv"),
    "state": ("async.state",),
    "message": ("message",),
    "aux": ("async.aux",),
}
"""Lanes that are delayed together, by the beginning of their names after the name of the rank."""
DELAYS: tuple[tuple[str, ...], ...] = (*((group,) for group in LANE_GROUPS), tuple(LANE_GROUPS))
FIRST = ("eager", "lazy", "random")
"""The first orders of the portfolio, which find most bugs. A cell begins at any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """held: number of the operation that runs late; it was submitted first. Names are checked too."""

    held: int
    held_name: str
    until: int
    until_name: str

    def text(self) -> str:
        return f"{self.held}.{self.held_name}~{self.until}.{self.until_name}"


def parse_pair(text: str) -> Pair:
    """Parse a pair. Raises UsageError."""
    found = _PAIR.fullmatch(text)
    if found is None or int(found[1]) >= int(found[3]):
        raise UsageError(
            f"strategy=flip: expected choices=NUMBER.NAME~NUMBER.NAME, the lower number first, got {text[:80]!r}; "
            "copy the whole line"
        )
    return Pair(held=int(found[1]), held_name=found[2], until=int(found[3]), until_name=found[4])


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """order: the portfolio's order that is due. choices: for a replay, the recorded ones; for a flip, the pair."""

    seed: int
    schedule: int
    choices: str | None
    order: str | None = None


class EagerStrategy:
    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        return min(range(len(enabled)), key=lambda at: (enabled[at][0].ordinal, enabled[at][1]))


class LazyStrategy:
    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        return None if may_pause else len(enabled) - 1


class DelayStrategy:
    def __init__(self, groups: Sequence[str]) -> None:
        self.groups = tuple(groups)
        self._delayed = tuple(start for group in self.groups for start in LANE_GROUPS[group])
        self._eager = EagerStrategy()

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        prompt = [at for at, (head, _) in enumerate(enabled) if not self._is_delayed(head.lane)]
        if prompt:
            return min(prompt, key=lambda at: (enabled[at][0].ordinal, enabled[at][1]))
        return None if may_pause else self._eager.choose(enabled, may_pause=False)

    def _is_delayed(self, lane: Lane) -> bool:
        return lane.name.rpartition(":")[2].startswith(self._delayed)


class RandomStrategy:
    """A fair coin between the process and the machine, then a uniform choice among enabled chunks."""

    def __init__(self, seed: int = 0) -> None:
        self._mix = Rng(seed)

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        if not may_pause:
            return self._mix.below(len(enabled)) if len(enabled) > 1 else 0
        at = self._mix.below(2 * len(enabled))
        return at if at < len(enabled) else None


class ReplayStrategy:
    """Replays recorded numbers; past their end it runs eagerly. Counts those that did not fit."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._choices = choices
        self._asked = 0
        self._bent = 0
        self._rest = EagerStrategy()

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        self._asked += 1
        if self._asked > len(self._choices):
            return self._rest.choose(enabled, may_pause=may_pause)
        recorded = self._choices[self._asked - 1] - 1
        if recorded < 0:
            self._bent += not may_pause
            return None if may_pause else 0
        self._bent += recorded >= len(enabled)
        return min(recorded, len(enabled) - 1)

    def divergence(self) -> str | None:
        recorded = len(self._choices)
        parts = [f"{self._bent} of them did not fit what was offered"] if self._bent else []
        if self._asked > recorded:
            parts.append(f"the run went on for {self._asked - recorded} choices after their end")
        elif self._asked < recorded:
            parts.append(f"{recorded - self._asked} were left over")
        return f"of {recorded} recorded choices: {' and '.join(parts)}" if parts else None


class FlipStrategy:
    """Eager, but one operation is held until a later one has run, or until the process waits and nothing else can run.

    Up to the later operation the run is the eager one, so the pair's numbers of an eager run still fit.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._is_holding = True
        self._names: dict[int, str] = {}
        self._eager = EagerStrategy()

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        free = [at for at, (head, _) in enumerate(enabled) if not self._holds(head)]
        if not free and may_pause:
            return None
        self._is_holding = self._is_holding and bool(free)
        offered = free or range(len(enabled))
        chosen = offered[self._eager.choose([enabled[at] for at in offered], may_pause=may_pause) or 0]
        self._ran(enabled[chosen][0])
        return chosen

    def divergence(self) -> str | None:
        """A pair that stayed in order is no divergence."""
        wanted = ((self._pair.held, self._pair.held_name), (self._pair.until, self._pair.until_name))
        parts = [
            f"#{ordinal} was {self._names[ordinal]}, not {name}" if ordinal in self._names else f"#{ordinal} never ran"
            for ordinal, name in wanted
            if self._names.get(ordinal) != name
        ]
        return f"of the two operations of the pair: {' and '.join(parts)}" if parts else None

    def _holds(self, head: Pending) -> bool:
        return self._is_holding and head.ordinal == self._pair.held

    def _ran(self, head: Pending) -> None:
        if head.ordinal in (self._pair.held, self._pair.until):
            self._names[head.ordinal] = head.operation.name
            # The later one is over with its last part.
            self._is_holding = self._is_holding and not (head.ordinal == self._pair.until and len(head.chunks) == 1)


@runtime_checkable
class Following(Protocol):
    def divergence(self) -> str | None: ...


class Recorder:
    """Wraps a strategy and keeps its choices: 0 for a pause, n + 1 for part n. Stops keeping at `limit`."""

    def __init__(self, inner: Chooser, limit: int = 200_000) -> None:
        self.inner = inner
        self._limit = limit
        self.choices = bytearray()
        self.is_whole = True

    def choose(self, enabled: Sequence[Choice], *, may_pause: bool, goal: Goal | None = None) -> int | None:
        chosen = self.inner.choose(enabled, may_pause=may_pause, goal=goal)
        number = 0 if chosen is None else chosen + 1
        if number > 255 or len(self.choices) >= self._limit:
            self.is_whole = False
        else:
            self.choices.append(number)
        return chosen

    def divergence(self) -> str | None:
        return self.inner.divergence() if isinstance(self.inner, Following) else None


def encode_choices(choices: bytes) -> str:
    return base64.urlsafe_b64encode(zlib.compress(bytes(choices), 9)).decode().rstrip("=")


def decode_choices(text: str) -> bytes:
    """Inverse of encode_choices. Raises UsageError."""
    try:
        return zlib.decompress(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (ValueError, zlib.error) as error:
        raise UsageError(f"schedule line: choices are damaged ({error}); copy the whole line") from error


def make_strategy(name: str, *, seed: int, schedule: int, choices: str | None, order: str | None = None) -> Chooser:
    return STRATEGIES.load(name)(Draw(seed=seed, schedule=schedule, choices=choices, order=order))


def delay_name(groups: tuple[str, ...]) -> str:
    return f"delay:{groups[0] if len(groups) == 1 else 'all'}"


def portfolio(draw: Draw) -> Chooser:
    delays = {delay_name(groups): groups for groups in DELAYS}
    if draw.order in delays:
        return DelayStrategy(delays[draw.order])
    orders = ("eager", "lazy", "random", "answers")
    if draw.order not in orders:
        known = ", ".join((*orders, *delays))
        raise UsageError(f"strategy portfolio: expected one of the orders {known}; got {draw.order!r}")
    return STRATEGIES.load(draw.order)(draw)


def eager(draw: Draw) -> Chooser:
    return EagerStrategy()


def lazy(draw: Draw) -> Chooser:
    return LazyStrategy()


def delay(draw: Draw) -> Chooser:
    """Each round of DELAYS begins one place further, so that every group meets all settings of a scenario."""
    return DelayStrategy(delayed_groups(draw.schedule))


def delayed_groups(schedule: int) -> tuple[str, ...]:
    return DELAYS[(schedule + schedule // len(DELAYS)) % len(DELAYS)]


def seeded_random(draw: Draw) -> Chooser:
    return RandomStrategy(Rng(draw.seed * 1_000_003 + draw.schedule).next_u64())


def replay(draw: Draw) -> Chooser:
    if draw.choices is None:
        raise UsageError("strategy replay needs recorded choices; use kvcheck replay with the line a failure printed")
    return ReplayStrategy(decode_choices(draw.choices))


def flip(draw: Draw) -> Chooser:
    if draw.choices is None:
        raise UsageError("strategy flip needs the two operations; use kvcheck replay with the line a failure printed")
    return FlipStrategy(parse_pair(draw.choices))
