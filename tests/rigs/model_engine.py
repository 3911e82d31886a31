"""What an engine does behind its calls: a prefix cache of pages, requests that run, retraction, aborts and counters."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rigs.wrong_answers import answer_with

from kvcheck.core.model.alphabet import Alphabet

STORES = {"response-cache": lambda ids: tuple(ids), "last-token-cache": lambda ids: ids[-1]}
COUNTS: dict[str, Callable[[int, int, int], int]] = {
    "cached-count": lambda cached, prompt, page: prompt - 1,
    "always-less-one": lambda cached, prompt, page: prompt - 1,
    "one-page-more": lambda cached, prompt, page: cached + page,
    "always-zero": lambda cached, prompt, page: 0,
    "hits-doubled": lambda cached, prompt, page: min(2 * cached, prompt - 1),
}
"""What is said of cached tokens instead of the truth. "cached-count": but for the first request."""


@dataclass(kw_only=True)
class Job:
    """A request that runs. cached: what is said of it. done: tokens that it has answered. top: the likely tokens of
    each step, with their log-probabilities; empty where the speech says its own, None where it says none."""

    ids: list[int]
    tokens: tuple[int, ...]
    cached: int | None
    retractions: int = 0
    is_aborted: bool = False
    done: int = 0
    top: list[dict[int, float]] | None = field(default_factory=list)


@dataclass(kw_only=True)
class ModelEngine:
    """The engine. pool, page: tokens. token_s: seconds that a token takes."""

    alphabet: Alphabet | None = None
    fault: str | None = None
    pool: int = 4096
    page: int = 16
    token_s: float = 0.0
    sent: list[list[int]] = field(default_factory=list)
    running: dict[str, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lock, self.going, self.over = threading.RLock(), threading.Event(), threading.Event()
        self.going.set()
        self._pages: dict[int, None] = {}  # a hash of all tokens up to the end of each page; the oldest first
        self._stored: dict[Any, tuple[int, ...]] = {}
        self._count = dict.fromkeys(("hits", "evicted", "retracted", "aborted", "requests", "tokens"), 0)

    @property
    def longest(self) -> int:
        """Tokens of a request and its answer."""
        assert self.alphabet is not None
        return self.alphabet.parameters.length

    def admit(self, rid: str, ids: list[int], count: int, salt: str | None = None) -> Job:
        """A request that runs from now on. salt: of no use here."""
        with self.lock:
            hit = []
            for key in self._keys(ids[:-1]):
                if key not in self._pages:
                    break
                hit.append(key)
            for key in hit:
                self._pages[key] = self._pages.pop(key)
            earlier = [each for each in self.sent if each != ids]
            assert self.alphabet is not None
            tokens = answer_with(self.fault, self.alphabet, ids, count, earlier, page=self.page)
            cached: int | None = len(hit) * self.page
            if self.fault in COUNTS and (earlier or self.fault != "cached-count"):
                cached = COUNTS[self.fault](len(hit) * self.page, len(ids), self.page)
            elif self.fault in STORES:
                key = STORES[self.fault](ids)
                cached = None if key in self._stored else cached
                tokens = self._stored.setdefault(key, tokens)
            self.sent.append(ids)
            self._count["hits"] += len(hit) * self.page
            self.running[rid] = Job(ids=ids, tokens=tokens, cached=cached)
            return self.running[rid]

    def steps(self, rid: str, job: Job) -> Iterator[int]:
        """The answer's tokens as they are made; at its end its pages stay in the cache, and the oldest make room."""
        try:
            for token in job.tokens:
                self.over.wait(self.token_s)
                self.going.wait()
                if job.is_aborted and self.fault != "after-abort":
                    return
                job.done += 1
                self._count["tokens"] += 1
                if job.done == len(job.tokens):
                    self._count["requests"] += 1
                yield token
        finally:
            with self.lock:
                self.running.pop(rid, None)
                self._count["aborted"] += job.done < len(job.tokens)
                self._pages |= dict.fromkeys(self._keys([*job.ids, *job.tokens[: job.done]]))
                while len(self._pages) * self.page > self.pool:
                    del self._pages[next(iter(self._pages))]
                    self._count["evicted"] += self.page

    def remember(self, ids: list[int]) -> None:
        self._pages |= dict.fromkeys(self._keys(ids))

    def abort(self, rid: str) -> None:
        with self.lock:
            if rid in self.running:
                self.running[rid].is_aborted = True

    def retract(self) -> None:
        with self.lock:
            self._count["retracted"] += len(self.running)
            for job in self.running.values():
                job.retractions += 1

    def flush(self) -> bool:
        with self.lock:
            if not self.running:
                self._pages.clear()
            return not self.running

    def counters(self) -> dict[str, int]:
        """hits and evicted: tokens; retracted and aborted: requests."""
        return dict.fromkeys(self._count, 0) if self.fault == "frozen-counters" else dict(self._count)

    def stop(self) -> None:
        """Whoever waits goes on."""
        self.over.set()
        self.going.set()

    def _keys(self, ids: list[int]) -> Iterator[int]:
        key = 0
        for end in range(self.page, len(ids) + 1, self.page):
            key = hash((key, *ids[end - self.page : end]))
            yield key
