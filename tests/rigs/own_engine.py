"""An engine with a model whose answers nobody knows beforehand: it completes repeated sequences, and it has noise.

The model goes on with what followed the last token when it was said before, as trained models do. Each log-probability
depends on all tokens that the cache holds, so a page that holds others moves it.

Invariants:
- What a page holds decides what is read. A fault changes pages, never answers.
- Salts are honoured unless the engine is told to ignore them.
- Noise of a batch is written into pages, and comes again with them; noise from run to run is drawn anew.
"""

from __future__ import annotations

import random
import zlib
from array import array
from dataclasses import dataclass, field

from rigs.model_engine import Job, ModelEngine

STALE, FOREIGN, SLIGHT, FOREIGN_ANSWER, NO_LOGPROBS, NO_SALTS = (
    *("stale", "foreign", "slight", "foreign-answer", "no-logprobs", "no-salts"),
)
FAULTS = (STALE, FOREIGN, SLIGHT, FOREIGN_ANSWER, NO_LOGPROBS, NO_SALTS)
PRIVATE_FROM = 12
"""The request without a salt, from 0, that a page is planted for: others have been answered before it."""


@dataclass(frozen=True)
class Page:
    """Tokens that it holds, and the noise that was written with them."""

    tokens: tuple[int, ...]
    noise: float


@dataclass(kw_only=True)
class OwnEngine(ModelEngine):
    """run, batch, warm: nats of noise from run to run, of the batch that wrote a page, and of prompts that are computed
    in part. crowd: of batches of more than `few` requests. decoded: of pages that an answer wrote, which are kept then;
    None: they are not. says_hits: whether answers say what was cached. planted: requests whose page was damaged.
    length: tokens of a request and its answer."""

    run: float = 0.0
    batch: float = 0.0
    warm: float = 0.0
    crowd: float = 0.0
    few: int = 4
    decoded: float | None = None
    says_hits: bool = True
    recites: bool = True
    length: int = 1024
    seed: int = 0
    planted: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._held: dict[int, Page] = {}
        self._draws = random.Random(self.seed)
        self._plain: list[list[int]] = []

    @property
    def longest(self) -> int:
        return self.length

    def admit(self, rid: str, ids: list[int], count: int, salt: str | None = None) -> Job:
        with self.lock:
            keys = [*self._salted(ids, salt)]
            hit = []
            for key in keys[: (len(ids) - 1) // self.page]:
                if key not in self._pages:
                    break
                hit.append(key)
            pages = [self._held[key] for key in hit] + self._computed(rid, ids, len(hit), salt)
            tokens, top = self._say([*pages], ids, count, hits=len(hit))
            if salt is None:
                if self.fault == FOREIGN_ANSWER and len(self._plain) == PRIVATE_FROM:
                    other = next(each for each in self._plain if each[:6] != ids[:6])  # shares no beginning
                    tokens, top = self._say([], other, count, hits=0)
                    self.planted.append(rid)
                self._plain.append(ids)
            for key, page in zip(keys, pages, strict=True):  # a page that is there stays what it is
                self._held.setdefault(key, page)
                self._pages.setdefault(key)
            self._count["hits"] += len(hit) * self.page
            if self.decoded is not None:
                self._keep_answer(ids, tokens, salt)
            job = Job(ids=ids, tokens=tuple(tokens), cached=len(hit) * self.page if self.says_hits else None)
            job.top = None if self.fault == NO_LOGPROBS else top
            self.running[rid] = job
            self._evict()
            return job

    def _keys(self, ids: list[int]) -> list[int]:  # type: ignore[override]
        """The cache of the engine below is not used."""
        return []

    def _keep_answer(self, ids: list[int], tokens: list[int], salt: str | None) -> None:
        """Pages that decode filled: it rounds in its own way, the same for the same tokens."""
        whole = [*ids, *tokens[:-1]]
        for number, key in enumerate(self._salted(whole, salt)):
            held = tuple(whole[number * self.page : (number + 1) * self.page])
            if key not in self._pages:
                self._held[key] = Page(held, (self.decoded or 0.0) * random.Random(str(held)).gauss(0.0, 1.0))
                self._pages[key] = None

    def _salted(self, ids: list[int], salt: str | None) -> list[int]:
        key = 0 if salt is None or self.fault == NO_SALTS else hash(salt)
        keys = []
        for end in range(self.page, len(ids) + 1, self.page):
            key = hash((key, *ids[end - self.page : end]))
            keys.append(key)
        return keys

    def _computed(self, rid: str, ids: list[int], first: int, salt: str | None) -> list[Page]:
        """Pages that this request writes; one of them damaged where the fault has its turn."""
        noise = self.batch * self._draws.gauss(0.0, 1.0) if len(self.running) else 0.0
        noise += self.crowd * self._draws.gauss(0.0, 1.0) if len(self.running) >= self.few else 0.0
        pages = [
            Page(tuple(ids[at : at + self.page]), noise)
            for at in range(first * self.page, len(ids) // self.page * self.page, self.page)
        ]
        is_due = salt is None and not self.planted and len(self._plain) >= PRIVATE_FROM and len(pages) > 2
        if is_due and self.fault in (STALE, FOREIGN):
            at = 1 + first
            long = [each for each in self._plain if len(each) >= (at + 1) * self.page]
            other = next((each for each in long if each[6:7] == ids[6:7] and each[:6] != ids[:6]), None)
            if other is not None:
                held = tuple(other[at * self.page : (at + 1) * self.page])
                pages[1] = Page(held if self.fault == FOREIGN else (7,) * self.page, noise)
                self.planted.append(rid)
        return pages

    def _say(
        self, pages: list[Page], ids: list[int], count: int, *, hits: int
    ) -> tuple[list[int], list[dict[int, float]]]:
        seen = [token for page in pages for token in page.tokens]
        seen += ids[len(seen) :]
        moved = sum(page.noise for page in pages)
        if hits and self.warm:
            moved += self.warm * random.Random(f"{hits}/{ids}").gauss(0.0, 1.0)
        if hits and self.fault == SLIGHT:
            moved += 0.2
        said, top = [], []
        for _ in range(count):
            step = self._likely(seen, moved + self.run * self._draws.gauss(0.0, 1.0))
            token = max(step, key=lambda each: step[each])
            said.append(token)
            top.append(step)
            seen.append(token)
        return said, top

    def _likely(self, seen: list[int], moved: float) -> dict[int, float]:
        last, held = seen[-1], zlib.crc32(array("I", seen).tobytes())
        before = next((at for at in range(len(seen) - 2, -1, -1) if seen[at] == last), None)
        first = seen[before + 1] if self.recites and before is not None else 2 + held % 97
        value = -0.2 - (held >> 8) % 1000 / 500.0
        return {first: value + moved, 100 + held % 89: value - 3.0, 200 + held % 83: value - 4.0}

    def _evict(self) -> None:
        while len(self._pages) * self.page > self.pool:
            key = next(iter(self._pages))
            del self._pages[key]
            self._held.pop(key, None)
            self._count["evicted"] += self.page
