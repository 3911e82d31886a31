"""A kept reference: one build's cold answers, to compare other builds with.

    DIR/reference.json    requests, tokens, log-probabilities, the build's own noise, the server's facts

Invariants:
- Servers of another model, dtype, parallelism or attention backend are refused: their answers rightly differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError, why_unread
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Answer, End, Question, Served
from kvcheck.core.live.line import OwnPlan
from kvcheck.core.live.own.prompts import SHORTEST, OwnQuestions, ids_of

FILE = "reference.json"
FORMAT = 1
LONGEST_PROMPT, ANSWER = 400, 48
SAME: Mapping[str, tuple[str, ...]] = {
    "dtype": ("dtype",),
    "KV cache dtype": ("kv_cache_dtype", "cache_dtype"),
    "quantization": ("quantization",),
    "tensor parallelism": ("tp_size", "tensor_parallel_size"),
    "pipeline parallelism": ("pp_size", "pipeline_parallel_size"),
    "data parallelism": ("dp_size", "data_parallel_size"),
    "attention backend": ("attention_backend",),
}
"""Facts that have to be equal, with the engines' names for them."""


@dataclass(frozen=True, slots=True)
class Kept:
    question: Question
    answer: Answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """A recorded reference. facts: as the server reported. again, control: its own noise, nats."""

    engine: str
    version: str | None
    model: str | None
    facts: Mapping[str, object]
    kept: tuple[Kept, ...]
    again: tuple[float, ...]
    control: tuple[float, ...]

    @property
    def digest(self) -> str:
        return _digest(_plain(self))

    def to_json(self) -> str:
        plain = _plain(self)
        return json.dumps({"format": FORMAT, "digest": _digest(plain), **plain}, allow_nan=False) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptRow:
    """A request in the file. top: [token, log-probability] pairs of each step."""

    ids: tuple[int, ...]
    asked: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    top: tuple[tuple[tuple[float, ...], ...], ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """The file, beside its format and digest."""

    engine: str
    version: str | None
    model: str | None
    facts: dict[str, object]
    requests: tuple[_KeptRow, ...]
    again: tuple[float, ...]
    control: tuple[float, ...]


_SHARED = ("engine", "version", "model", "facts", "again", "control")


def draw_questions(plan: OwnPlan) -> list[Question]:
    """Prompts of many lengths that share nothing. Raises UsageError."""
    source = OwnQuestions(ids_of(plan.vocabulary), longest=plan.longest, names=plan.names)
    rng = Rng(plan.seed)
    most = max(SHORTEST + 1, min(LONGEST_PROMPT, plan.longest * 3 // 5))
    return [
        source.put(rng, source.walk(rng, SHORTEST + rng.below(most - SHORTEST)), ANSWER) for _ in range(plan.requests)
    ]


def read_reference(folder: Path) -> Reference:
    path = folder / FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{folder} is no reference: {FILE}: {why_unread(error)}; make one with kvcheck model reference URL DIR"
        ) from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON that kvcheck wrote; record the reference again") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise UsageError(f"{path}: expected format {FORMAT}, got {got}; record the reference again with this kvcheck")
    plain = {name: value for name, value in data.items() if name not in ("format", "digest")}
    if data.get("digest") != _digest(plain):
        raise UsageError(f"{path} was changed: expected digest {data.get('digest')}, got {_digest(plain)}")
    try:
        return _read(plain)
    except ValueError as error:
        raise UsageError(f"{path} is no whole reference: {error}") from error


def check_alike(reference: Reference, served: Served) -> list[str]:
    """List the facts that neither server reports. Raises UsageError if a fact in SAME differs."""
    untold = []
    pairs: list[tuple[str, object, object]] = [
        ("engine", reference.engine, served.engine),
        ("model", reference.model, served.model),
        *((name, _fact(reference.facts, keys), _fact(served.facts, keys)) for name, keys in SAME.items()),
    ]
    for name, then, now in pairs:
        if then is None and now is None:
            untold.append(name)
        elif then != now:
            raise UsageError(
                f"--reference: its server had {name} {_shown(then)}, and this one has {_shown(now)}: answers differ "
                "rightly; start the server as it was, or record a reference with this one"
            )
    return untold


def _fact(facts: Mapping[str, object], keys: Sequence[str]) -> object:
    return next((facts[key] for key in keys if key in facts), None)


def _shown(value: object) -> str:
    return "a value that it does not say" if value is None else str(value)


def _plain(reference: Reference) -> dict[str, object]:
    rows = tuple(
        _KeptRow(
            ids=each.question.ids,
            asked=len(each.question.expected),
            tokens=each.answer.tokens,
            logprobs=each.answer.logprobs or (),
            top=None if each.answer.top is None else tuple(tuple(step.items()) for step in each.answer.top),
        )
        for each in reference.kept
    )
    plain = to_plain(_Written(requests=rows, **{name: getattr(reference, name) for name in _SHARED}))
    assert isinstance(plain, dict), "a dataclass becomes a dict"
    return plain


def _digest(plain: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:16]


def _read(plain: Mapping[str, object]) -> Reference:
    written: _Written = value_from(_Written, plain, "reference")
    if not written.requests:
        raise ValueError("requests: expected at least one")
    kept = tuple(_kept(number, row) for number, row in enumerate(written.requests))
    return Reference(kept=kept, **{name: getattr(written, name) for name in _SHARED})


def _kept(number: int, row: _KeptRow) -> Kept:
    if len(row.tokens) != len(row.logprobs) or not row.tokens:
        raise ValueError(f"request {number}: expected a log-probability for each of {len(row.tokens)} tokens")
    if row.top is not None and len(row.top) != len(row.tokens):
        raise ValueError(f"request {number}: expected a list of tokens for each step")
    if not len(row.tokens) <= row.asked <= 1 << 20:
        raise ValueError(f"request {number}: expected at least as many tokens asked for as answered")
    pairs = [pair for step in row.top or () for pair in step]
    tokens = (*row.ids, *row.tokens, *(token for token, _ in pairs))
    if any(type(token) is not int or token < 0 for token in tokens):
        raise ValueError(f"request {number}: expected token ids from 0 on")
    steps = None if row.top is None else tuple({int(token): value for token, value in step} for step in row.top)
    question = Question(number=number, ids=row.ids, expected=(0,) * row.asked)
    return Kept(question, Answer(end=End.DONE, tokens=row.tokens, logprobs=row.logprobs, top=steps))


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no number")
