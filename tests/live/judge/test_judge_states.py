"""Places of a model with recurrent states: a state of another request is no second key, and has no pages."""

from __future__ import annotations

import pytest
from rigs.known_answers import small
from rigs.live_answers import exchange

from kvcheck.core.live.exchange import Question
from kvcheck.core.live.judge import PagePlace, SentPrompts, ServerSetting, judge_round
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, reads, walk_prompt

MODEL = small(family="qwen3-next", length=2048)
ALPHABET = Alphabet(MODEL)
PAGE = 16
SETTING = ServerSetting(alphabet=ALPHABET, page=PAGE, retracts=False, began_empty=True)
STEP = 0  # no earlier step has read a page right


def question(number: int, nodes: list[int]) -> Question:
    ids = walk_prompt(ALPHABET, nodes, 0)
    return Question(number=number, ids=ids, expected=answers(ALPHABET, ids, 8))


OWN = question(1, list(range(61)))
READ = reads(ALPHABET, OWN.ids, STEP + 1)[STEP].positions


def looked_for(layer: int) -> int:
    """The node whose next one a layer finds at that step."""
    position = READ[layer]
    assert position is not None
    node = ALPHABET.as_place(OWN.ids[position - 1])
    assert node is not None
    return node


def places(lost: int, others: list[Question]) -> tuple[PagePlace, ...]:
    """What an answer points to that is lost at a layer at that step."""
    tokens = (*OWN.expected[:STEP], *[ALPHABET.lost(lost, None)] * (len(OWN.expected) - STEP))
    exchanges = (exchange(OWN, tokens=tokens), *map(exchange, others))
    (wrong,) = judge_round(SETTING, exchanges, SentPrompts().plus(ALPHABET, ())).wrong
    return wrong.places


def other(number: int, node: int) -> Question:
    """A request that lists a node of the own one far behind, and no other one of them."""
    return question(number, [*range(100 + 60 * (number - 2), 155 + 60 * (number - 2)), node])


@pytest.mark.parametrize("lost", [2, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_layer_is_before_the_state_that_may_be_of_another_request(lost: int, count: int) -> None:
    node = looked_for(lost - 1)
    alone = places(lost, [])
    found = places(lost, [other(2 + i, node) for i in range(count)])
    assert {(each.layer, each.page) for each in found} == {(each.layer, each.page) for each in alone}
    assert found[0] == alone[0] and found[0].layer == lost
    before = next(each for each in found if each.layer == lost - 1)
    position = READ[lost - 1]
    assert position is not None and before.page == position // PAGE
    assert all(f"request {2 + i} lists node {node} too; its state would lead" in before.why for i in range(count))
    assert before.weight == pytest.approx(0.7) and "second key" not in before.why
