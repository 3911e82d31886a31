"""Literal exchanges with a server of known answers: right by default, with what a test changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rigs.known_answers import small

from kvcheck.core.live.exchange import AbortRequest, Answer, End, Exchange, Question, Sending
from kvcheck.core.live.judge import Judgement, SentPrompts, ServerSetting, judge_round
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, mark_prompt, walk_prompt

MODEL = small(length=2048)
ALPHABET = Alphabet(MODEL)
SETTING = ServerSetting(alphabet=ALPHABET, page=16, retracts=False, began_empty=True)


def walk_question(number: int, nodes: Sequence[int], *, start: int = 0, count: int = 20) -> Question:
    """A walk over these nodes, with its answer."""
    ids = walk_prompt(ALPHABET, nodes, start)
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, count))


def marks_question(number: int, values: Sequence[int], *, phase: int = 0, count: int = 20) -> Question:
    """A position test of these values, with its answer."""
    ids = mark_prompt(ALPHABET, values, phase)
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, count))


def exchange(
    question: Question, *, abort: AbortRequest | None = None, rid: str | None = None, **answer: Any
) -> Exchange:
    """The right answer to a question, with some of its fields changed."""
    whole: dict[str, Any] = {"end": End.DONE, "tokens": question.expected, "finish": "length"}
    return Exchange(
        Sending(question=question, rid=rid or f"r{question.number}", abort=abort), Answer(**(whole | answer))
    )


def with_token(question: Question, step: int, token: int) -> tuple[int, ...]:
    return (*question.expected[:step], token, *question.expected[step + 1 :])


def judged(*exchanges: Exchange, before: Sequence[Exchange] = (), setting: ServerSetting = SETTING) -> Judgement:
    return judge_round(setting, exchanges, SentPrompts().plus(ALPHABET, before))


def codes(judgement: Judgement) -> list[str]:
    return [wrong.code for wrong in judgement.wrong]
