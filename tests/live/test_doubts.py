"""Answers that a response cache gives, beside those that an engine gives."""

from __future__ import annotations

from rigs.live_client import exchange

from kvcheck.core.live.doubts import doubts
from kvcheck.core.live.exchange import Abort, End, Question

ASKED = Question(number=4, ids=(1, 3, 9), expected=(5,))


def test_answers_under_their_own_names_raise_no_doubt() -> None:
    assert doubts([exchange(ASKED, cached=0), exchange(ASKED, cached=2)]) == []
    assert doubts([exchange(ASKED, rid="r4"), exchange(ASKED, rid="cmpl-r4-0")]) == []
    assert doubts([exchange(ASKED), exchange(ASKED)]) == []


def test_an_answer_under_another_name_may_be_stored() -> None:
    found = doubts([exchange(ASKED, rid="r4"), exchange(ASKED, rid="cmpl-r3")])
    assert len(found) == 1
    assert "1 answers came under the name of another request, the first for request 4" in found[0]


def test_an_answer_that_says_less_than_others_may_be_stored() -> None:
    found = doubts([exchange(ASKED, cached=0), exchange(ASKED, cached=None)])
    assert len(found) == 1
    assert "1 answers do not say how many tokens were cached" in found[0]


def test_an_aborted_answer_may_say_less() -> None:
    aborted = exchange(ASKED, abort=Abort(after=0), end=End.ABORTED, cached=None, rid="r3")
    assert doubts([exchange(ASKED, cached=0), aborted]) == []
