"""Crowd: requests that share prefixes in seeded ways, and whose token every position holds.

A token's content depends on all tokens before it. So every token belongs to a line: the request that was the first to
continue a prefix by it. Requests that share a prefix share its lines, and write equal bytes.

Invariants:
- A token tells its line and its position, so no two prefixes have the same tokens by chance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcheck.core.probes.frame.probe import Rig

LENGTH = 64
"""Positions that a line may have."""


@dataclass(frozen=True, slots=True)
class Line:
    """A run of tokens and who was the first to have it: positions first .. end - 1."""

    author: int
    first: int
    end: int


def token(author: int, position: int) -> int:
    """The token at a position of a line."""
    return 1 + author * LENGTH + position


def tokens_of(lines: Iterable[Line]) -> list[int]:
    """Tokens that tell line and position."""
    return [token(each.author, at) for each in lines for at in range(each.first, each.end)]


@dataclass(slots=True, kw_only=True)
class Live:
    """A request of a schedule. engine: the engine's object for it. outputs: tokens that it will produce."""

    number: int
    lines: tuple[Line, ...]
    outputs: int
    priority: int
    engine: Any = None
    table: tuple[int, ...] = ()
    preemptions: int = 0
    is_waiting: bool = True

    @property
    def name(self) -> str:
        """The engine's name for it."""
        return str(self.number)

    def line_at(self, position: int) -> int:
        """Whose line the token at that position is of."""
        return next((each.author for each in self.lines if each.first <= position < each.end), self.number)

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop, author) of the lines between two positions."""
        start = first
        while start < end:
            author, stop = self.line_at(start), start + 1
            while stop < end and self.line_at(stop) == author:
                stop += 1
            yield start, stop, author
            start = stop

    def tokens(self, end: int) -> list[int]:
        """Its tokens before that position, those that it will produce included."""
        return [token(self.line_at(at), at) for at in range(end)]


def serve(rig: Rig, lives: Mapping[str, Live], step: Callable[[], None], steps: int) -> None:
    """Steps until no request is left; KV901 for those that still are after so many."""
    for _ in range(steps):
        if not lives:
            return
        step()
    rig.judge.find("KV901", "liveness", f"{len(lives)} requests are not finished after {steps} steps")


@dataclass(slots=True)
class Crowd:
    """Draws requests whose prompts continue each other. make: the engine's own object for a request."""

    rig: Rig
    page: int
    make: Callable[[Live], Any]
    made: list[Live] = field(default_factory=list)

    def draw(self, longest: int, outputs: int) -> Live:
        """The next request: a new prompt, or one that begins like an earlier request's prompt and output."""
        mix, number = self.rig.mix, len(self.made) + 1
        base: tuple[Line, ...] = ()
        kind, pick, cut = mix.below(4), mix.below(max(1, len(self.made))), mix.below(longest - self.page)
        if kind and self.made:
            base = tuple(_cut(whole(self.made[pick]), max(self.page, cut)))
        start = base[-1].end if base else 0
        lines = (*base, Line(number, start, start + 1 + mix.below(max(1, longest - start))))
        return self._add(lines, 1 + mix.below(outputs), mix.below(3))

    def alone(self, length: int, outputs: int, priority: int) -> Live:
        """A request whose prompt continues nobody's."""
        return self._add((Line(len(self.made) + 1, 0, length),), outputs, priority)

    def after(self, other: Live, length: int, outputs: int) -> Live:
        """A request whose prompt continues all that another one has, and will have produced."""
        lines = whole(other)
        end = lines[-1].end
        return self._add((*lines, Line(len(self.made) + 1, end, end + length)), outputs, other.priority)

    def _add(self, lines: tuple[Line, ...], outputs: int, priority: int) -> Live:
        live = Live(number=len(self.made) + 1, lines=lines, outputs=outputs, priority=priority)
        live.engine = self.make(live)
        self.made.append(live)
        self.rig.judge.count("requests")
        return live


def whole(live: Live) -> tuple[Line, ...]:
    """Its prompt and output."""
    end = live.lines[-1].end
    return (*live.lines, Line(live.number, end, end + live.outputs))


def _cut(lines: Sequence[Line], end: int) -> Iterator[Line]:
    for each in lines:
        if each.first < end:
            yield Line(each.author, each.first, min(each.end, end))
