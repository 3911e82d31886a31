"""When a trial of own models plants a page, and which one; without a server."""

from __future__ import annotations

import pytest

from kvcheck.core.base.rng import Rng
from kvcheck.core.live.exchange import Sending
from kvcheck.core.live.own.prompts import FRAME, OwnQuestions, ids_of
from tools.servers.own_trials import CASES, FIRST, Case, _plan


def sending(number: int) -> tuple[Sending, tuple[int, ...]]:
    source = OwnQuestions(ids_of(2048), longest=1024, names=number)
    question = source.put(Rng(number), source.walk(Rng(number), 200), 32)
    return Sending(question=question, rid="r"), source.code_asked(question)


def of(name: str) -> Case:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("page", [16, 32])
def test_the_page_with_the_code_that_is_asked_for_is_planted_once(page: int) -> None:
    for number in range(10):
        asked, code = sending(number)
        orders = [_plan(of("vllm-needle"), number, page)(count, asked) for count in range(20)]
        (order,) = [each for each in orders if each is not None]
        assert orders[number % FIRST] is order and order.same == 1
        held = asked.question.ids[order.page * page : (order.page + 1) * page]
        assert code in [held[at : at + len(code)] for at in range(len(held))] and len(asked.question.ids) > FRAME


def test_a_run_without_a_fault_plants_nothing_and_a_stale_page_once() -> None:
    asked, _ = sending(1)
    assert not any(_plan(of("sglang-equal"), 3, 16)(count, asked) for count in range(50))
    orders = [_plan(of("sglang-stale"), 3, 16)(count, asked) for count in range(50)]
    assert [at for at, each in enumerate(orders) if each is not None] == [3]
