"""The judge's input about a server, and its output for one round.

Invariants:
- A picture and a finding's `minimal` hold JSON types only, so a record returns them unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.record import Finding
from kvcheck.core.model.alphabet import Alphabet

ORACLE = "known-answers"
ASSUMED_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSetting:
    """page: None: ASSUMED_PAGE. retracts: retractions may have happened. began_empty: its cache held none of these
    prompts when the run began. transfers: it reports tokens that another server computed as cached, as the decode half
    of a pair does. own_chunk: prefill chunk of an engine that reports a request's own chunks as cached. elsewhere: why
    answers may not be the engine's, so that no page is named."""

    alphabet: Alphabet
    page: int | None = None
    retracts: bool = True
    began_empty: bool = False
    transfers: bool = False
    own_chunk: int | None = None
    longest: int | None = None
    elsewhere: str | None = None

    @property
    def page_tokens(self) -> int:
        return self.page or ASSUMED_PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class PagePlace:
    """head: None unless one is meant. first, last: positions. weight: only the order counts."""

    layer: int
    head: int | None
    page: int
    first: int
    last: int
    weight: float
    why: str

    def to_json(self) -> dict[str, object]:
        return {
            "layer": self.layer,
            "head": self.head,
            "page": self.page,
            "first": self.first,
            "last": self.last,
            "weight": round(self.weight, 3),
            "why": self.why,
        }

    def __str__(self) -> str:
        head = "" if self.head is None else f", KV head {self.head}"
        return f"layer {self.layer}{head}, page {self.page} (positions {self.first} to {self.last})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong:
    """step: None if no token is wrong. reads: position that this step read, by layer. places: most likely first. layer,
    page: common to all faults that explain the answer; unnamed: why there is neither. others: requests that the token
    or answer belongs to. picture: for a report: test, page (tokens), page_assumed, prompt (tokens), right and wrong
    (positions by layer of the last right step and of this one), suspects."""

    code: str
    request: int
    rid: str
    step: int | None = None
    expected: int | None = None
    expected_word: str | None = None
    answered: int | None = None
    answered_word: str | None = None
    logprob: float | None = None
    reads: tuple[int | None, ...] = ()
    places: tuple[PagePlace, ...] = ()
    layer: int | None = None
    page: int | None = None
    unnamed: str | None = None
    others: tuple[int, ...] = ()
    message: str
    picture: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """A request not judged to its end. tokens: compared all the same."""

    request: int
    rid: str
    end: str
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Cached counts of answers. judged: bounded by earlier requests; above: beyond their bound. cold: prompts that
    nothing before them begins like; hits: those that report a hit; sure_hits: without a retraction to explain it."""

    judged: int = 0
    above: int = 0
    cold: int = 0
    hits: int = 0
    sure_hits: int = 0
    example: str | None = None

    def plus(self, other: Counts) -> Counts:
        return Counts(
            judged=self.judged + other.judged,
            above=self.above + other.above,
            cold=self.cold + other.cold,
            hits=self.hits + other.hits,
            sure_hits=self.sure_hits + other.sure_hits,
            example=self.example or other.example,
        )

    @property
    def refuted(self) -> str | None:
        if not self.sure_hits and self.hits * 2 <= self.cold:
            return None
        return (
            f"{self.hits} of {self.cold} cold prompts report cached tokens that nobody had sent before, the first one "
            f"{self.example}: the count of answers is false, and no hit counts"
        )

    @property
    def is_false(self) -> bool:
        return self.above * 2 > self.judged or self.hits * 2 > self.cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The result of one round. tokens: compared. requests: with a compared token. notes: assumptions."""

    tokens: int
    requests: int
    wrong: tuple[Wrong, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)


def finding(wrong: Wrong) -> Finding:
    row = wrong.reads[wrong.layer] if wrong.layer is not None and wrong.page is not None and wrong.reads else None
    return Finding(
        code=wrong.code,
        oracle=ORACLE,
        layer=wrong.layer,
        page=wrong.page,
        row=row,
        request=wrong.request,
        seen_request=wrong.others[0] if wrong.others else None,
        message=wrong.message,
        minimal={
            **wrong.picture,
            "requests": [wrong.request, *wrong.others],
            "rid": wrong.rid,
            "step": wrong.step,
            "expected": wrong.expected,
            "expected_word": wrong.expected_word,
            "answered": wrong.answered,
            "answered_word": wrong.answered_word,
            "logprob": wrong.logprob,
        },
    )
