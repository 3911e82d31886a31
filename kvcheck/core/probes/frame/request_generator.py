"""Request generator: seeded requests with shared prefixes. The token at each position identifies its author.

The KV of a token depends on all tokens before it. So each token has one author: the first request that continued a
prefix by it. Requests with a common prefix share its spans and write equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcheck.core.probes.frame.probe import Rig

LENGTH = 64
"""Most positions of a request."""


class PrefixPages:
    """Pages by the prefix whose last tokens they hold. size: tokens of a page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._pages: dict[tuple[int, ...], set[int]] = {}
        self._prefix: dict[int, tuple[int, ...]] = {}

    def hit(self, tokens: Sequence[int]) -> int:
        """Pages of the longest cached prefix. The last token is always computed again, so it is no part of a hit."""
        count = 0
        while (count + 1) * self._size < len(tokens) and self._pages.get(tuple(tokens[: (count + 1) * self._size])):
            count += 1
        return count

    def holds(self, tokens: Sequence[int], page: int) -> bool:
        return self._prefix.get(page) == tuple(tokens)

    def hand_out(self, page: int) -> bool:
        """Return whether a cached prefix was lost."""
        prefix = self._prefix.pop(page, None)
        if prefix is None:
            return False
        self._pages[prefix].discard(page)
        return True

    def register(self, tokens: Sequence[int], table: Sequence[int]) -> None:
        for place in range(len(tokens) // self._size):
            prefix, page = tuple(tokens[: (place + 1) * self._size]), table[place]
            if self._prefix.get(page) != prefix:
                self.hand_out(page)
                self._prefix[page] = prefix
                self._pages.setdefault(prefix, set()).add(page)

    def clear(self) -> None:
        self._pages.clear()
        self._prefix.clear()


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens at positions first .. end - 1. author: the first request with them."""

    author: int
    first: int
    end: int


def token(author: int, position: int) -> int:
    return 1 + author * LENGTH + position


def tokens_of(spans: Iterable[TokenSpan]) -> list[int]:
    return [token(each.author, at) for each in spans for at in range(each.first, each.end)]


@dataclass(slots=True, kw_only=True)
class TrackedRequest:
    """A request of a schedule. request: the engine's object for it. outputs: tokens that it will produce."""

    number: int
    spans: tuple[TokenSpan, ...]
    outputs: int
    priority: int
    request: Any = None
    table: tuple[int, ...] = ()
    preemptions: int = 0
    is_waiting: bool = True

    @property
    def name(self) -> str:
        return str(self.number)

    def author_at(self, position: int) -> int:
        return next((each.author for each in self.spans if each.first <= position < each.end), self.number)

    def author_runs(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        start = first
        while start < end:
            author, stop = self.author_at(start), start + 1
            while stop < end and self.author_at(stop) == author:
                stop += 1
            yield start, stop, author
            start = stop

    def tokens(self, end: int) -> list[int]:
        return [token(self.author_at(at), at) for at in range(end)]


def finish_requests(rig: Rig, unfinished: Mapping[str, TrackedRequest], step: Callable[[], None], steps: int) -> None:
    """Step until all requests have finished. Requests left after `steps` are a finding, KV901."""
    for _ in range(steps):
        if not unfinished:
            return
        step()
    rig.judge.find("KV901", "liveness", f"{len(unfinished)} requests are not finished after {steps} steps")


@dataclass(slots=True)
class RequestGenerator:
    """Draws requests whose prompts continue each other. make: builds the engine's object for a request."""

    rig: Rig
    page: int
    make: Callable[[TrackedRequest], Any]
    made: list[TrackedRequest] = field(default_factory=list)

    def draw(self, longest: int, outputs: int) -> TrackedRequest:
        mix, number = self.rig.mix, len(self.made) + 1
        base: tuple[TokenSpan, ...] = ()
        kind, pick, cut = mix.below(4), mix.below(max(1, len(self.made))), mix.below(longest - self.page)
        if kind and self.made:
            base = tuple(_cut(whole(self.made[pick]), max(self.page, cut)))
        start = base[-1].end if base else 0
        spans = (*base, TokenSpan(number, start, start + 1 + mix.below(max(1, longest - start))))
        return self._add(spans, 1 + mix.below(outputs), mix.below(3))

    def unshared(self, length: int, outputs: int, priority: int) -> TrackedRequest:
        return self._add((TokenSpan(len(self.made) + 1, 0, length),), outputs, priority)

    def continuing(self, other: TrackedRequest, length: int, outputs: int) -> TrackedRequest:
        spans = whole(other)
        end = spans[-1].end
        return self._add((*spans, TokenSpan(len(self.made) + 1, end, end + length)), outputs, other.priority)

    def _add(self, spans: tuple[TokenSpan, ...], outputs: int, priority: int) -> TrackedRequest:
        tracked = TrackedRequest(number=len(self.made) + 1, spans=spans, outputs=outputs, priority=priority)
        tracked.request = self.make(tracked)
        self.made.append(tracked)
        self.rig.judge.count("requests")
        return tracked


def whole(tracked: TrackedRequest) -> tuple[TokenSpan, ...]:
    end = tracked.spans[-1].end
    return (*tracked.spans, TokenSpan(tracked.number, end, end + tracked.outputs))


def _cut(spans: Sequence[TokenSpan], end: int) -> Iterator[TokenSpan]:
    for each in spans:
        if each.first < end:
            yield TokenSpan(each.author, each.first, min(each.end, end))
