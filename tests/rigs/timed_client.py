"""A client without a server whose answers carry times of a clock that nobody waits for."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rigs.live_client import ScriptedClient

from kvcheck.core.live.clients.client import Trouble
from kvcheck.core.live.exchange import Answer, Counters, End, Sending, Served

PAGE = 16


@dataclass
class TimedClient(ScriptedClient):
    """prompt_s, token_s: seconds of a prompt's token that is computed, and of an answered one. noise: standard
    deviation of the logarithm of a request's time. changed: what a test makes of an answer. at_once: tokens of an
    event. entered: called with the name while a request is asked."""

    name: str = "timed"
    prompt_s: float = 0.001
    token_s: float = 0.01
    noise: float = 0.0
    seed: int = 1
    changed: Callable[[Sending, Answer], Answer] = lambda sending, answer: answer
    at_once: int = 1
    page: int | None = PAGE
    pool: int | None = 4096
    has_cache: bool = True
    says_cached: bool = True
    entered: Callable[[str], None] = lambda name: None
    counted: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: {"evict": ("evicted",)})
    said: frozenset[str] = frozenset({"hit"})
    flags: Mapping[str, str] = field(default_factory=lambda: {"hit": "start it with a cache"})
    flushed: int = 0
    now_s: float = 100.0

    def __post_init__(self) -> None:
        self._lock, self._random = threading.Lock(), random.Random(self.seed)
        self._pages: set[tuple[int, ...]] = set()

    def served(self) -> Served:
        return Served(engine=self.engine, version="1", page=self.page, pool=self.pool)

    def ask(self, sending: Sending) -> Answer:
        with self._lock:
            self.asked.append(sending)
            self.entered(self.name)
            ids, expected = sending.question.ids, sending.question.expected
            pages = [ids[:end] for end in range(PAGE, len(ids), PAGE)]
            hit = 0
            while self.has_cache and hit < len(pages) and pages[hit] in self._pages:
                hit += 1
            self._pages.update(pages)
            cached = hit * PAGE
            factor = self._random.lognormvariate(0.0, self.noise)
            began_s = self.now_s
            first_s = began_s + factor * (self.prompt_s * (len(ids) - cached) + self.token_s * self.at_once)
            last_s = first_s + factor * self.token_s * (len(expected) - self.at_once)
            self.now_s = last_s
            answer = Answer(
                end=End.DONE,
                tokens=expected,
                prompt_tokens=len(ids),
                cached=cached if self.says_cached else None,
                began_s=began_s,
                ended_s=last_s,
                first_s=first_s,
                last_s=last_s,
                first_tokens=min(self.at_once, len(expected)),
            )
            return self.changed(sending, answer)

    def counters(self) -> Counters | None:
        return {"evicted": 16.0 * len(self.asked)}

    def retract(self) -> None:
        raise AssertionError("nothing is retracted while it is timed")

    def flush(self) -> None:
        self.flushed += 1
        if not self.has_cache:
            raise Trouble("POST /flush: 404")
        self._pages.clear()
