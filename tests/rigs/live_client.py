"""A client without a server: it answers from the alphabet, and a test says what it does otherwise."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rigs.known_answers import small

from kvcheck.core.live.clients.client import Trouble
from kvcheck.core.live.exchange import AbortRequest, Answer, Counters, End, Exchange, Question, Sending, Served
from kvcheck.core.model.alphabet import Alphabet

PARAMETERS = small(kv_heads=2, group=1, length=2048, dtype="fp32", nodes=1024, digits=6, distance=40)
ALPHABET = Alphabet(PARAMETERS)


@dataclass
class ScriptedClient:
    """answer: what a sending is answered; None of it: rightly. moved: by how much each reading moves each counter.
    asked: every sending so far. retractions: calls of retract."""

    answer: Callable[[Sending], Answer | None] = lambda sending: None
    moved: Mapping[str, float] | None = None
    alive: bool = True
    counted: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    computed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    said: frozenset[str] = frozenset()
    flags: Mapping[str, str] = field(default_factory=dict)
    may_retract: bool = True
    engine: str = "scripted"
    has_salts: bool = True
    asked: list[Sending] = field(default_factory=list)
    retractions: int = 0
    _readings: int = 0

    def served(self) -> Served:
        return Served(engine=self.engine, version="1", page=16)

    def ask(self, sending: Sending) -> Answer:
        self.asked.append(sending)
        return self.answer(sending) or right(sending)

    def counters(self) -> Counters | None:
        if self.moved is None:
            return None
        self._readings += 1
        return {name: step * self._readings for name, step in self.moved.items()}

    def is_alive(self) -> bool:
        return self.alive

    def retract(self) -> None:
        if not self.may_retract:
            raise Trouble("POST /retract: 404 not found")
        self.retractions += 1

    def flush(self) -> None:
        """Nothing is cached here."""


def right(sending: Sending, **changes: object) -> Answer:
    tokens, end = sending.question.expected, End.DONE
    if sending.abort is not None:
        tokens, end = tokens[: sending.abort.after + 1], End.ABORTED
    now = time.monotonic()
    fields: dict[str, object] = {"end": end, "tokens": tokens, "prompt_tokens": len(sending.question.ids)}
    return Answer(**{**fields, "began_s": now, "ended_s": now, **changes})  # type: ignore[arg-type]


def exchange(
    question: Question,
    *,
    began_s: float = 0.0,
    ended_s: float = 1.0,
    priority: int | None = None,
    abort: AbortRequest | None = None,
    **changes: object,
) -> Exchange:
    sending = Sending(question=question, rid=f"r{question.number}", priority=priority, abort=abort)
    return Exchange(sending, right(sending, began_s=began_s, ended_s=ended_s, **changes))
