"""Hand-written answers, good and bad: each code where it belongs, and no accusation for what an engine may do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.known_answers import marks, walk
from rigs.live_answers import (
    ALPHABET,
    MODEL,
    SETTING,
    codes,
    exchange,
    judged,
    marks_question,
    walk_question,
    with_token,
)

from kvcheck.core.base.record import Finding, to_plain, value_from
from kvcheck.core.live.exchange import AbortRequest, End, Exchange, Question
from kvcheck.core.live.judge import ServerSetting, finding
from kvcheck.core.model.alphabet import END, TOO_LITTLE
from kvcheck.core.model.answers import answers

WALK = walk_question(1, range(100, 161), start=5)
OTHER = walk_question(2, range(200, 241), start=7)
MARKS = marks_question(3, [(7 * i) % 256 for i in range(MODEL.distance + 20)])
QUESTIONS = (WALK, OTHER, MARKS)
CLOSED = AbortRequest(after=3)
CALLED = AbortRequest(after=3, by_call=True)


@pytest.mark.parametrize("page, notes", [(16, 0), (None, 1)])
def test_an_assumed_page_size_is_said(page: int | None, notes: int) -> None:
    judgement = judged(exchange(WALK), setting=replace(SETTING, page=page))
    assert len(judgement.notes) == notes
    assert all("16" in note for note in judgement.notes)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("step", [0, 11, 19])
@pytest.mark.parametrize("token", [TOO_LITTLE, END, ALPHABET.lost(2, None), 10**6])
def test_a_wrong_token_is_named_with_its_step(question: Question, step: int, token: int) -> None:
    judgement = judged(exchange(question, tokens=with_token(question, step, token)))
    (wrong,) = judgement.wrong
    assert (wrong.code, wrong.request, wrong.step) == ("KV801", question.number, step)
    assert (wrong.expected, wrong.answered) == (question.expected[step], token)
    assert wrong.expected_word == ALPHABET.word(question.expected[step])
    assert judgement.tokens == 20


WALKS = [walk_question(20 + i, range(0, 61), start=i) for i in range(8)]


def answered_with(nodes: Sequence[int]) -> list[Exchange]:
    """One wrong node in each of several walks over the nodes 0 to 60."""
    return [
        exchange(each, tokens=with_token(each, 6, ALPHABET.node(node)))
        for each, node in zip(WALKS, nodes, strict=False)
    ]


def test_nodes_that_one_other_request_lists_are_its_tokens() -> None:
    """The other request lists 41 of the 195 nodes beside those of a walk."""
    for wrong in (
        judged(*answered_with(range(203, 211)), exchange(OTHER)).wrong,
        judged(*answered_with(range(203, 211)), before=[exchange(OTHER)]).wrong,
    ):
        assert [(each.code, each.others) for each in wrong] == [("KV802", (2,))] * 8
        assert all("request 2" in each.message for each in wrong)


@pytest.mark.parametrize("nodes", [[210], [210, 211, 212, 150, 151, 152, 153, 154], [150, 200]])
def test_nodes_that_another_request_lists_as_often_as_chance_gives_have_no_owner(nodes: list[int]) -> None:
    for wrong in judged(*answered_with(nodes), exchange(OTHER)).wrong:
        assert (wrong.code, wrong.others, wrong.layer, wrong.page) == ("KV801", (), None, None)
        assert "cause" in (wrong.unnamed or "")


@pytest.mark.parametrize("step", [0, 4, 11])
def test_one_wrong_mark_names_no_place(step: int) -> None:
    (wrong,) = judged(exchange(MARKS, tokens=with_token(MARKS, step, MARKS.expected[step] ^ 1))).wrong
    assert (wrong.code, wrong.layer, wrong.page) == ("KV801", None, None)


def test_a_failed_lookup_among_many_wrong_nodes_names_no_place() -> None:
    """Of eight random words, one is a failed lookup in 16 % of such rounds."""
    lost = walk_question(30, range(0, 61), start=9)
    failed = [
        exchange(lost, tokens=(*lost.expected[:step], *([ALPHABET.lost(2, None)] * (20 - step))))
        for step in range(1, 20)
    ]

    def places(*others: Exchange) -> set[int | None]:
        rounds = (judged(each, *others).wrong for each in failed)
        return {each.page for wrong in rounds for each in wrong if each.request == 30}

    assert places() > {None}
    assert places(*answered_with(range(150, 157))) == {None}


@pytest.mark.parametrize("node, listed", [(110, range(200, 241)), (250, range(200, 241)), (130, range(105, 146))])
def test_a_node_of_the_own_prompt_or_of_nobody_is_a_wrong_token(node: int, listed: range) -> None:
    other = exchange(walk_question(2, listed))
    assert codes(judged(exchange(WALK, tokens=with_token(WALK, 6, ALPHABET.node(node))), other)) == ["KV801"]


def test_the_first_wrong_token_is_the_finding() -> None:
    lost = ALPHABET.lost(0, None)
    (wrong,) = judged(exchange(WALK, tokens=(*WALK.expected[:4], ALPHABET.lost(2, None), *([lost] * 15)))).wrong
    assert (wrong.step, wrong.answered) == (4, ALPHABET.lost(2, None))


@pytest.mark.parametrize("count, code", [(3, "KV802"), (4, "KV801"), (9, "KV801")])
def test_a_node_that_many_requests_list_names_nobody(count: int, code: str) -> None:
    others = [exchange(walk_question(10 + i, range(200, 241), start=i)) for i in range(count)]
    wrong = answered_with(range(203, 211))
    assert codes(judged(*wrong, *others)) == [code] * 8
    assert codes(judged(*wrong, before=others)) == [code] * 8


@pytest.mark.parametrize("question, other", [(WALK, OTHER), (MARKS, WALK), (OTHER, MARKS)])
def test_the_whole_answer_of_another_request(question: Question, other: Question) -> None:
    for judgement in (
        judged(exchange(question, tokens=other.expected), exchange(other)),
        judged(exchange(question, tokens=other.expected), before=[exchange(other)]),
    ):
        (wrong,) = judgement.wrong
        assert (wrong.code, wrong.others) == ("KV802", (other.number,))
        assert "whole answer" in wrong.message


@pytest.mark.parametrize("question", [WALK, MARKS])
@pytest.mark.parametrize("step", [0, 3, 12])
@pytest.mark.parametrize("shift", [1, 2, -1])
def test_a_skipped_or_repeated_token_is_a_shift(question: Question, step: int, shift: int) -> None:
    longer = answers(ALPHABET, question.ids, 30)
    stream = (question.ids[-1], *longer)
    if step + 1 + shift < 0:
        return
    tokens = (*longer[:step], *stream[step + 1 + shift :])[:20]
    (wrong,) = judged(exchange(question, tokens=tokens)).wrong
    assert (wrong.code, wrong.step) == ("KV803", step)
    assert ("skips" if shift > 0 else "repeats") in wrong.message and str(abs(shift)) in wrong.message


def test_fewer_than_four_tokens_are_no_answer_of_another_request() -> None:
    other = marks_question(9, [(13 * i + 1) % 256 for i in range(MODEL.distance + 20)])
    begun = {"end": End.ABORTED, "finish": None}
    for count, code in ((3, "KV801"), (4, "KV802")):
        short = exchange(MARKS, tokens=other.expected[:count], **begun)
        assert codes(judged(short, exchange(other))) == [code]


def test_an_answer_that_only_begins_as_another_one_is_not_its_whole_answer() -> None:
    tokens = (OTHER.expected[0], *([ALPHABET.lost(0, None)] * 19))
    (wrong,) = judged(exchange(WALK, tokens=tokens), exchange(OTHER)).wrong
    assert (wrong.code, "whole" in wrong.message) == ("KV801", False)


FAR = answers(ALPHABET, WALK.ids, 60)


@pytest.mark.parametrize(
    "tokens, code",
    [
        ((*FAR[:5], *FAR[17:32]), "KV801"),  # a wrong hop to a far place of the walk, and to a near one
        ((*FAR[:5], *FAR[10:25]), "KV801"),
        ((*WALK.expected[:17], *WALK.expected[16:19]), "KV801"),  # fewer than four tokens
        (FAR[:21], "KV808"),
        ((*with_token(WALK, 4, END), END), "KV801"),  # of another length too
    ],
)
def test_what_is_no_shift_and_what_is_too_long(tokens: tuple[int, ...], code: str) -> None:
    assert codes(judged(exchange(WALK, tokens=tokens))) == [code]


LONG, SHORT = (walk_question(number, range(0, 61), count=count) for number, count in ((4, 80), (5, 40)))


@pytest.mark.parametrize(
    "question, after, code",
    [(LONG, 41, "KV804"), (LONG, 40, None), (SHORT, 33, "KV804"), (SHORT, 32, None), (WALK, 2, None)],
)
def test_an_answer_long_after_the_abort(question: Question, after: int, code: str | None) -> None:
    assert codes(judged(exchange(question, abort=CALLED, after_abort=after))) == ([] if code is None else [code])


LEGAL: dict[str, tuple[Question, dict[str, Any]]] = {
    "aborted by us": (WALK, {"abort": CLOSED, "end": End.ABORTED, "tokens": WALK.expected[:5], "finish": None}),
    "aborted by a call, acknowledged": (
        LONG,
        {"abort": CALLED, "end": End.ABORTED, "tokens": LONG.expected[:60], "after_abort": 55, "finish": "abort"},
    ),
    "aborted by a call, ended as done": (
        WALK,
        {"abort": CALLED, "tokens": WALK.expected[:5], "after_abort": 1, "finish": "length"},
    ),
    "aborted by a call, connection ended": (
        WALK,
        {"abort": CALLED, "end": End.CUT, "tokens": WALK.expected[:5], "after_abort": 1, "finish": None},
    ),
    "aborted by the engine": (WALK, {"end": End.ABORTED, "tokens": WALK.expected[:5], "finish": "abort"}),
    "ended by the engine, as it says": (WALK, {"tokens": WALK.expected[:5], "finish": "abort"}),
    "refused": (WALK, {"end": End.REFUSED, "tokens": (), "finish": None, "reason": "HTTP 503"}),
    "silent": (WALK, {"end": End.SILENT, "tokens": WALK.expected[:9], "finish": None}),
    "unreached": (WALK, {"end": End.UNREACHED, "tokens": (), "finish": None}),
    "another count of the prompt": (WALK, {"prompt_tokens": len(WALK.ids) + 1, "tokens": OTHER.expected}),
}


@pytest.mark.parametrize("name", LEGAL)
def test_what_is_no_finding_is_told_with_its_reason(name: str) -> None:
    question, changes = LEGAL[name]
    judgement = judged(exchange(question, **changes))
    assert codes(judgement) == []
    (row,) = judgement.unjudged
    assert row.reason and row.request == question.number
    is_set_up = "prompt_tokens" in changes
    assert judgement.tokens == row.tokens == (0 if is_set_up else len(changes["tokens"]))


@pytest.mark.parametrize("name", [name for name, (_, changes) in LEGAL.items() if len(changes["tokens"]) in (5, 9)])
def test_tokens_before_an_abort_are_judged(name: str) -> None:
    question, changes = LEGAL[name]
    tokens = (*changes["tokens"][:-1], TOO_LITTLE)
    assert codes(judged(exchange(question, **(changes | {"tokens": tokens})))) == ["KV801"]


@pytest.mark.parametrize("end", [End.CUT, End.UNREADABLE])
def test_a_broken_off_answer(end: End) -> None:
    early = exchange(WALK, abort=CLOSED, end=end, tokens=WALK.expected[:2], finish=None)
    assert codes(judged(early)) == ["KV807"], "the abort had not been sent"
    judgement = judged(exchange(WALK, end=end, tokens=WALK.expected[:5], reason="no closing line"))
    assert codes(judgement) == ["KV807"]
    assert "5 tokens" in judgement.wrong[0].message and "no closing line" in judgement.wrong[0].message


@pytest.mark.parametrize("finish", ["length", None])
def test_an_answer_that_ends_early_without_a_reason(finish: str | None) -> None:
    assert codes(judged(exchange(WALK, tokens=WALK.expected[:19], finish=finish))) == ["KV808"]
    assert codes(judged(exchange(WALK, tokens=(), finish=finish))) == ["KV808"]


@pytest.mark.parametrize("room, expected", [(0, []), (15, []), (16, ["KV808"]), (1000, ["KV808"])])
def test_a_request_that_may_not_fit_may_end_early(room: int, expected: list[str]) -> None:
    longest = len(WALK.ids) + len(WALK.expected) + room
    judgement = judged(exchange(WALK, tokens=WALK.expected[:10]), setting=replace(SETTING, longest=longest))
    assert codes(judgement) == expected
    assert len(judgement.unjudged) == (not expected)


@given(st.data())
def test_a_right_server_is_never_accused(data: st.DataObject) -> None:
    """Random walks and position tests, cut anywhere, aborted, retracted, cached up to what may be."""
    exchanges, sent = [], set()
    retracts = data.draw(st.booleans())
    for number in range(data.draw(st.integers(1, 5))):
        seed = data.draw(st.integers(0, 3))
        is_walk = data.draw(st.booleans())
        ids = walk(MODEL, count=40 + 3 * seed, seed=seed) if is_walk else marks(MODEL, count=40, seed=seed)
        count = data.draw(st.integers(1, 90))
        question = Question(number=number, ids=ids, expected=answers(ALPHABET, ids, count))
        came = data.draw(st.integers(0, count))
        end = data.draw(st.sampled_from([End.DONE, End.ABORTED, End.REFUSED, End.SILENT, End.UNREACHED]))
        abort = data.draw(st.sampled_from([None, AbortRequest(after=0), AbortRequest(after=came, by_call=True)]))
        changes: dict[str, Any] = {"end": end, "tokens": question.expected[:came]}
        if end is End.DONE and came < count and abort is None:
            changes["finish"] = "abort"
        if end is End.DONE and abort is not None:
            changes["after_abort"] = data.draw(st.integers(0, min(came, 32)))
        if ids in sent:
            changes["cached"] = data.draw(st.integers(0, len(ids)))
        elif retracts:
            changes |= {
                "retractions": data.draw(st.sampled_from([None, 1])),
                "cached": data.draw(st.integers(0, len(ids))),
            }
        sent.add(ids)
        exchanges.append(exchange(question, abort=abort, **changes))
    cut = data.draw(st.integers(0, len(exchanges)))
    setting = replace(SETTING, retracts=retracts)
    judgement = judged(*exchanges[cut:], before=exchanges[:cut], setting=setting)
    assert codes(judgement) == []
    later = exchanges[cut:]
    assert judgement.tokens == sum(len(each.answer.tokens) for each in later)


@given(
    step=st.integers(0, 19),
    token=st.integers(0, ALPHABET.size - 1),
    which=st.sampled_from(QUESTIONS),
    seed=st.integers(),
)
def test_any_other_token_is_found(step: int, token: int, which: Question, seed: int) -> None:
    if token == which.expected[step]:
        return
    (wrong,) = judged(exchange(which, tokens=with_token(which, step, token)), exchange(OTHER)).wrong[:1]
    assert wrong.step == step and wrong.code in ("KV801", "KV802", "KV803")


def test_a_finding_is_read_back_from_a_record_as_it_was() -> None:
    setting = ServerSetting(alphabet=ALPHABET)
    bad = exchange(WALK, tokens=with_token(WALK, 1, ALPHABET.lost(2, 1)), logprobs=(-0.5,) * 20)
    (wrong,) = judged(bad, setting=setting).wrong
    found = finding(wrong)
    assert value_from(Finding, json.loads(json.dumps(to_plain(found))), "finding") == found
    assert found.minimal is not None
    assert found.minimal["page_assumed"] is True and found.minimal["prompt"] == len(WALK.ids)
    assert (found.oracle, found.request, found.layer) == ("known-answers", 1, 2)
    assert found.row == wrong.reads[2] and found.page == wrong.reads[2] // 16
    assert found.minimal["wrong"] == list(wrong.reads) and found.minimal["right"] is not None
