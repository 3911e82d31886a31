"""What a judge is told of a server, and what it says of one round: values only.

Invariants:
- `Wrong` accuses the server; `Unjudged` accuses nobody, and says why nothing could be said.
- A picture and a finding's `minimal` hold nothing but what JSON holds: read back from a record, they are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.record import Finding
from kvcheck.core.model.alphabet import Alphabet

ORACLE = "known-answers"
ASSUMED_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of the server while a round ran.

    page: tokens of a page, None where the server does not say: then 16 are assumed. retracts: retractions may have
    happened. began_empty: its cache held nothing of these prompts when the run began, because it was flushed, or
    because no earlier run can have sent them; where this is not known, a cached count is compared with the prompt's
    length alone. transfers: it counts tokens that another server computed as cached, as the decode half of a pair
    does. own_chunk: tokens of a prefill chunk, for an engine that counts the chunks that a request computed itself as
    cached; None: it does not. longest: most tokens of a request and its answer. elsewhere: why answers may come from
    something before the engine, so that no page is named; None: nothing says so.
    """

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
        """Tokens of a page, as said or as assumed."""
        return self.page or ASSUMED_PAGE


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A page of one layer that a wrong answer points to. head: None where several heads, or no one in particular, are
    meant. first, last: positions of the request. weight: evidence for it, larger is stronger; only the order counts.
    """

    layer: int
    head: int | None
    page: int
    first: int
    last: int
    weight: float
    why: str

    def to_json(self) -> dict[str, object]:
        """For a record."""
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
    """One thing that a right server does not do.

    step: of the answer, from 0; None where no token of the answer is wrong. expected, answered: tokens, with their
    words. reads: position of the request that this step read, by layer. places: most likely first. layer, page: what
    all faults that explain the answer have in common; unnamed: why there is neither. others: requests whose token or
    answer it is. picture: what a report draws: test, page (tokens), page_assumed, prompt (tokens), right and wrong
    (positions by layer of the last right step and of this one), suspects.
    """

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
    places: tuple[Place, ...] = ()
    layer: int | None = None
    page: int | None = None
    unnamed: str | None = None
    others: tuple[int, ...] = ()
    message: str
    picture: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unjudged:
    """A request of which some or all is not judged. tokens: those that came and were compared all the same."""

    request: int
    rid: str
    end: str
    reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Counts:
    """Cached counts of answers. judged: those that are bounded by what was sent; above: those that are larger. cold:
    prompts that nothing before them began as; hits, sure_hits: those of them that report a hit all the same, and where
    no retraction explains it. example: the first of them."""

    judged: int = 0
    above: int = 0
    cold: int = 0
    hits: int = 0
    sure_hits: int = 0
    example: str | None = None

    def plus(self, other: Counts) -> Counts:
        """Both together."""
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
        """Why no hit of these answers is believed; None where nothing speaks against them."""
        if not self.sure_hits and self.hits * 2 <= self.cold:
            return None
        return (
            f"{self.hits} of {self.cold} cold prompts report cached tokens that nobody had sent before, the first one "
            f"{self.example}: the count of answers is false, and no hit counts"
        )

    @property
    def is_false(self) -> bool:
        """Whether most counts are larger than they can be: the report is wrong, and not what one request was given."""
        return self.above * 2 > self.judged or self.hits * 2 > self.cold


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What one round showed. tokens: compared with what a right server answers, after a first wrong one as well.
    requests: those of which at least one token was compared. notes: what was assumed. counts: cached counts of answers.
    """

    tokens: int
    requests: int
    wrong: tuple[Wrong, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    notes: tuple[str, ...] = ()
    counts: Counts = field(default_factory=Counts)


def finding(wrong: Wrong) -> Finding:
    """For the record. Scenario, shape, schedule and replay are the caller's to set."""
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
