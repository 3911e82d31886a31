"""Where a wrong answer points to: each row of the ranking, by hand, and damage of a real forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rigs.known_answers import forward, marks, small, walk
from rigs.live_answers import ALPHABET, MODEL, exchange, judged, marks_question, walk_question, with_token
from rigs.llama_forward import Cache, LlamaForward

from kvcheck.core.base.errors import UsageError
from kvcheck.core.live.exchange import Exchange, Question
from kvcheck.core.live.judge import PagePlace, Wrong, finding
from kvcheck.core.live.judge.steps import Listing, steps
from kvcheck.core.model.alphabet import TOO_LITTLE, TOO_MUCH, Alphabet
from kvcheck.core.model.answers import answers, reads

NODES = [(37 * i + 5) % 256 for i in range(200)]  # own page at each step: no two requests share a run of nodes
LONG = walk_question(1, NODES, start=3, count=120)
LAST = MODEL.layers - 1
PAGE = 16


def page_of(question: Question, step: int, layer: int) -> int:
    return reads(ALPHABET, question.ids, step + 1)[step].positions[layer] // PAGE


def answered(question: Question, step: int, token: int, *others: Exchange) -> Wrong:
    """The finding of an answer whose token at `step` is wrong; the server goes on from there, or is lost."""
    begun = (*question.expected[:step], token)
    left = len(question.expected) - len(begun)
    try:
        rest = answers(ALPHABET, (*question.ids, *begun), left)
    except UsageError:
        rest = (ALPHABET.lost(0, None),) * left
    tokens = (*begun, *rest)
    return next(wrong for wrong in judged(exchange(question, tokens=tokens), *others).wrong if wrong.request == 1)


def places_found(wrong: Wrong) -> tuple[int | None, int | None]:
    """The layer and page of its finding."""
    found = finding(wrong)
    return found.layer, found.page


def where(places: Sequence[PagePlace]) -> list[tuple[int, int | None, int]]:
    return [(place.layer, place.head, place.page) for place in places]


@pytest.mark.parametrize("layer", range(MODEL.layers))
def test_a_lost_layer_is_its_keys_or_the_values_before(layer: int) -> None:
    read = [page_of(LONG, step, layer) for step in range(1, 120)]
    step = next(step for step in range(12, 120) if read[step - 1] not in read[: step - 1])  # no right step read it
    wrong = answered(LONG, step, ALPHABET.lost(layer, None))
    assert where(wrong.places)[0] == (layer, None, page_of(LONG, step, layer))
    expected = {(layer, None, page_of(LONG, step, layer))}
    if layer:
        expected |= {(layer - 1, None, page_of(LONG, step, layer - 1)), (0, None, page_of(LONG, step, layer))}
    assert set(where(wrong.places)) == expected
    assert wrong.reads == reads(ALPHABET, LONG.ids, step + 1)[step].positions
    first = wrong.places[0]
    assert (first.first, first.last) == (first.page * PAGE, first.page * PAGE + PAGE - 1)
    found = finding(wrong)  # nothing in layer 0 is all that a whole foreign context makes, too
    assert (found.layer in (None, layer), found.page) == (True, first.page if layer else None)
    assert (f"page {first.page}" in wrong.message) == bool(layer)


def test_a_lost_head_is_its_keys() -> None:
    wrong = answered(LONG, 1, ALPHABET.lost(2, 3))
    assert where(wrong.places)[0] == (2, 3, page_of(LONG, 1, 2))
    assert wrong.places[1].weight < wrong.places[0].weight / 5


@pytest.mark.parametrize("token", [TOO_LITTLE, TOO_MUCH])
def test_too_little_and_too_much_are_values_of_the_last_layer(token: int) -> None:
    assert where(answered(LONG, 1, token).places) == [(LAST, None, page_of(LONG, 1, LAST))]


def test_a_page_that_a_right_step_read_counts_half() -> None:
    """Here layer 2 reads a page that it has read right before, and layer 1 one that it has not."""
    step = next(
        step
        for step in range(2, 120)
        if page_of(LONG, step, 2) in {page_of(LONG, each, 2) for each in range(1, step)}
        and page_of(LONG, step, 1) not in {page_of(LONG, each, 1) for each in range(1, step)}
    )
    places = answered(LONG, step, ALPHABET.lost(2, None)).places
    assert where(places[:2]) == [(1, None, page_of(LONG, step, 1)), (2, None, page_of(LONG, step, 2))]
    assert [place.weight for place in places[:2]] == [0.6, 0.5]
    assert "right" in places[1].why


def lost_in(layers: tuple[int, ...]) -> list[PagePlace]:
    """The first place of each of some requests that share a walk's beginning: each is lost at another layer, as it
    runs into page 1."""
    exchanges = []
    for number, layer in enumerate(layers, 1):
        start = next(
            start
            for start in range(120)
            for question in [walk_question(number, NODES[:121], start=start, count=2)]
            if page_of(question, 1, layer) == 1 and (layer == 0 or page_of(question, 1, layer - 1) == 0)
        )
        question = walk_question(number, NODES[:121], start=start, count=20)
        exchanges.append(exchange(question, tokens=(question.expected[0], *(ALPHABET.lost(layer, None),) * 19)))
    return [wrong.places[0] for wrong in judged(*exchanges).wrong]


def test_a_page_where_requests_are_lost_in_several_layers_was_wrong_in_layer_0_when_prefill_read_it() -> None:
    assert {(place.layer, place.page) for place in lost_in((2, 3, 2, 0))} == {(0, 1)}
    assert {(place.layer, place.page) for place in lost_in((2, 2, 2))} == {(2, 1)}


def test_the_first_token_comes_from_prefill_and_clears_no_page() -> None:
    start = next(
        start
        for start in range(200)
        for question in [walk_question(1, NODES, start=start, count=2)]
        if page_of(question, 0, 2) == page_of(question, 1, 2)
    )
    question = walk_question(1, NODES, start=start, count=20)
    assert answered(question, 1, ALPHABET.lost(2, None)).places[0].weight == 1.0


def test_a_node_of_another_request_was_found_in_the_last_layer() -> None:
    short = walk_question(1, NODES[:50], count=20)
    assert where(answered(short, 4, ALPHABET.node(NODES[70])).places)[0] == (LAST, None, page_of(short, 4, LAST))


def test_a_node_of_the_own_walk_can_have_been_found_in_any_layer() -> None:
    wrong = answered(LONG, 1, ALPHABET.node(NODES[150]))
    assert {place.layer for place in wrong.places} == set(range(MODEL.layers))
    assert len({place.weight for place in wrong.places}) == 1
    assert wrong.unnamed is not None and "points to layer" not in wrong.message
    assert (finding(wrong).layer, finding(wrong).page, finding(wrong).minimal["suspects"]) == (None, None, [])


@pytest.mark.parametrize("layer", [1, 2, 3])
def test_a_list_of_another_request_says_which_layer_was_led_astray(layer: int) -> None:
    """Another request lists the node that this layer looks for, and after it the one that leads to the answer."""
    (step,) = list(steps(ALPHABET, LONG.ids, LONG.expected[:2]))[1:]
    token = ALPHABET.node(NODES[150])
    found = Listing.of(ALPHABET, LONG.ids).back(NODES[150], LAST - layer)
    assert found is not None
    unused = [node for node in range(256) if node not in (step.path[layer], found)]
    other = walk_question(2, [*unused[:8], step.path[layer], found, *unused[8:15]], count=8)
    wrong = answered(LONG, 1, token, exchange(other))
    assert where(wrong.places)[0] == (layer, None, page_of(LONG, 1, layer))
    assert "request 2" in wrong.places[0].why


def test_a_second_key_in_the_page_of_another_request() -> None:
    """<little>: the last layer found two places. The other request lists the same node 30 places further on."""
    (step,) = list(steps(ALPHABET, LONG.ids, LONG.expected[:2]))[1:]
    unused = [node for node in range(256) if node != step.path[LAST] and node != step.path[LAST + 1]]
    other = walk_question(2, [*unused[:60], step.path[LAST], *unused[60:81]], count=8)
    page = (2 + 61) // PAGE
    assert page != page_of(LONG, 1, LAST)
    places = answered(LONG, 1, TOO_LITTLE, exchange(other)).places
    assert where(places) == [(LAST, None, page), (LAST, None, page_of(LONG, 1, LAST))]
    lost = answered(LONG, 1, ALPHABET.lost(LAST, None), exchange(other)).places
    assert (LAST - 1, None, page) not in where(lost)  # that layer looked for another node


@pytest.mark.parametrize("layer, head", [(layer, head) for layer in range(4) for head in range(4)])
def test_the_bits_of_a_mark_name_layer_and_head(layer: int, head: int) -> None:
    question = marks_question(1, [(11 * i) % 256 for i in range(90)], count=30)
    phases, heads = MODEL.phases, MODEL.kv_heads
    pair = layer * heads + head
    step = next(
        i
        for i, token in enumerate(question.expected)
        if i > 3 and (ALPHABET.as_mark(token) or (0, 0))[0] == (pair // MODEL.bits + 1) % phases
    )
    mark = ALPHABET.as_mark(question.expected[step])
    assert mark is not None
    token = ALPHABET.mark(mark[0], mark[1] ^ 1 << pair % MODEL.bits)
    wrong = answered(question, step, token)
    position = len(question.ids) - 1 + step - MODEL.distance
    assert where(wrong.places)[0] == (layer, head, position // PAGE)
    assert wrong.picture["test"] == "position"


def test_bits_of_several_heads_name_the_layer_alone() -> None:
    question = marks_question(1, [(11 * i) % 256 for i in range(90)], count=30)
    mark = ALPHABET.as_mark(question.expected[5])
    assert mark is not None
    wrong = answered(question, 5, ALPHABET.mark(mark[0], mark[1] ^ 0b11))
    assert wrong.places[0].head is None
    assert wrong.places[0].layer == ((mark[0] - 1) % MODEL.phases * MODEL.bits) // MODEL.kv_heads


def test_requests_that_share_a_page_add_their_evidence() -> None:
    step = 1
    one = walk_question(1, NODES, start=3, count=20)
    two = walk_question(2, NODES, start=3, count=20)
    lost = ALPHABET.lost(2, None)
    alone = answered(one, step, lost).places[0]
    both = answered(one, step, lost, exchange(two, tokens=with_token(two, step, lost))).places[0]
    assert both.weight == 2 * alone.weight and "1 more" in both.why
    apart = walk_question(2, [NODES[100], *NODES[1:100], NODES[0], *NODES[101:]], start=3, count=20)
    other = answered(one, step, lost, exchange(apart, tokens=with_token(apart, step, lost))).places[0]
    assert other.weight == alone.weight


def test_steps_after_a_wrong_node_give_evidence_too() -> None:
    far = NODES[150]
    after = answers(ALPHABET, (*LONG.ids[:-1], ALPHABET.node(far)), 3)
    lost = ALPHABET.lost(1, None)
    tokens = (LONG.expected[0], ALPHABET.node(far), *after[:2], lost, *([ALPHABET.lost(0, None)] * 115))
    (wrong,) = judged(exchange(LONG, tokens=tokens)).wrong
    assert wrong.step == 1
    read = reads(ALPHABET, (*LONG.ids[:-1], ALPHABET.node(far)), 3)[2].positions
    assert (1, None, read[1] // PAGE) in where(wrong.places)


def test_tokens_that_are_never_answered_point_nowhere() -> None:
    assert answered(LONG, 4, 0).places == ()
    assert answered(LONG, 4, 10**6).places == ()


@pytest.mark.parametrize("family", ["llama", "gpt-oss"])
@given(seed=st.integers(0, 1 << 30), count=st.integers(5, 80), length=st.integers(1, 60), is_walk=st.booleans())
def test_steps_of_a_right_answer_are_its_reads(family: str, seed: int, count: int, length: int, is_walk: bool) -> None:
    model = small(family=family, length=2048)
    if is_walk:
        ids = walk(model, count=count if gcd(count, model.hops) == 1 else count + 1, seed=seed)
    else:
        ids = marks(model, count=model.farthest + count, seed=seed)
    alphabet = Alphabet(model)
    right = answers(alphabet, ids, length)
    taken = list(steps(alphabet, ids, right))
    assert [step.positions for step in taken] == [read.positions for read in reads(alphabet, ids, length)]
    assert [step.expected for step in taken] == list(right) and all(step.is_right for step in taken)


def assert_no_other(wrong: Wrong, layer: int, page: int | None) -> None:
    """No other layer and no other page is named than these. page: None where all pages of the layer are damaged."""
    found = finding(wrong)
    assert found.layer in (None, layer) and (page is None or found.page in (None, page)), wrong.message


@functools.cache
def model() -> LlamaForward:
    return forward(MODEL)


MARKS, FOREIGN_MARKS = (marks_question(n, [(k * i) % 256 for i in range(50)], count=33) for n, k in ((1, 11), (2, 7)))
WALK, FOREIGN_WALK = walk_question(1, range(0, 61), count=62), walk_question(2, range(100, 161), count=62)


def said_over(question: Question, step: int, damage: Callable[[Cache], None]) -> tuple[int, ...]:
    """What the model answers whose cache is damaged before the token of `step` is made."""
    own = (*question.ids, *question.expected[:step])
    cache, said = Cache(), [*question.expected[:step]]
    model().step(own[:-1], cache)
    damage(cache)
    logits = model().step(own[-1:], cache)
    for _ in question.expected[step:]:
        said.append(int(logits.argmax()))
        logits = model().step(said[-1:], cache)
    return tuple(said)


@pytest.mark.parametrize("layer", range(MODEL.layers))
@pytest.mark.parametrize("page", [1, 3])
@pytest.mark.parametrize("damage", ["foreign", "zero", "values"])
def test_damage_of_a_page_is_named_by_what_a_model_answers(layer: int, page: int, damage: str) -> None:
    foreign, rows = Cache(), slice(page * PAGE, (page + 1) * PAGE)
    model().step(FOREIGN_WALK.ids, foreign)

    def change(cache: Cache) -> None:
        if damage != "values":
            cache.keys[layer][rows] = 0 if damage == "zero" else foreign.keys[layer][rows]
        cache.values[layer][rows] = 0 if damage == "zero" else foreign.values[layer][rows]

    (wrong,) = judged(exchange(WALK, tokens=said_over(WALK, 1, change)), exchange(FOREIGN_WALK)).wrong
    named = [(place.layer, place.page) for place in wrong.places]
    # Wrong values are missed by the next layer, whose keys may as well be wrong: both are suspects.
    assert (layer, page) in (named[:2] if damage == "values" and layer < LAST else named[:1])
    assert_no_other(wrong, layer, page)


@pytest.mark.parametrize("one, two", [(MARKS, FOREIGN_MARKS), (WALK, FOREIGN_WALK)])
@pytest.mark.parametrize("step", [0, 1, 3, 5, 8, 10, 13, 16, 19])
def test_a_whole_foreign_context_names_no_page(one: Question, two: Question, step: int) -> None:
    foreign = Cache()
    model().step((*two.ids, *two.expected), foreign)

    def restore(cache: Cache) -> None:
        for own, other in zip(cache.keys + cache.values, foreign.keys + foreign.values, strict=True):
            own[:] = other[: len(own)]

    (wrong,) = judged(exchange(one, tokens=said_over(one, step, restore)), exchange(two)).wrong
    found = finding(wrong)
    assert (found.layer, found.page, found.minimal["suspects"]) == (None, None, [])
    assert one is WALK or (wrong.code, wrong.others) == ("KV802", (2,))


@pytest.mark.parametrize("times", [2.0, 0.5])
@pytest.mark.parametrize("layer", range(MODEL.layers))
def test_a_wrong_scale_of_values_names_no_page_where_marks_show_it(times: float, layer: int) -> None:
    """The marks show that values of a head are too strong, and not of which layer: walks of that round name none."""

    def scale(cache: Cache) -> None:
        cache.values[layer][PAGE : 3 * PAGE, 1] *= times

    lost = walk_question(3, NODES[:61], start=3, count=20)
    walk_of_round = exchange(lost, tokens=with_token(lost, 4, ALPHABET.lost(2, None)))
    wrong = judged(exchange(MARKS, tokens=said_over(MARKS, 0, scale)), walk_of_round).wrong
    found = {each.request: finding(each) for each in wrong}
    assert found[3].page is None or 1 not in found or times < 1
    if 1 in found:  # one head of a late layer at twice its strength can leave every mark right
        assert (found[1].layer, found[1].page, found[1].minimal["suspects"]) == (None, None, [])


@pytest.mark.parametrize("layer", range(MODEL.layers))
@pytest.mark.parametrize("page", [None, 1, 2, 3])
@pytest.mark.parametrize("times", [2.0, 0.5])
def test_values_of_a_wrong_scale_are_no_keys_of_the_next_layer(layer: int, page: int | None, times: float) -> None:
    rows = slice(None) if page is None else slice(page * PAGE, (page + 1) * PAGE)

    def scale(cache: Cache) -> None:
        cache.values[layer][rows] *= times

    (wrong,) = judged(exchange(WALK, tokens=said_over(WALK, 1, scale))).wrong
    assert_no_other(wrong, layer, page)


@pytest.mark.parametrize("question", [MARKS, WALK])
@pytest.mark.parametrize("layer", range(MODEL.layers))
@pytest.mark.parametrize("heads", [slice(None), slice(2, 3)], ids=["all", "one"])
def test_keys_of_twice_their_strength_name_no_other_page(question: Question, layer: int, heads: slice) -> None:
    """They win lookups of all steps, wherever those read."""
    layers = []
    for page in range(len(question.ids) // PAGE):

        def double(cache: Cache, page: int = page) -> None:
            cache.keys[layer][page * PAGE : (page + 1) * PAGE, heads] *= 2

        for wrong in judged(exchange(question, tokens=said_over(question, 1, double))).wrong:
            assert_no_other(wrong, layer, page)
            layers.append(finding(wrong).layer)
    assert layers and (question is WALK or layers.count(layer) * 2 > len(layers))


def test_faults_that_answer_alike_name_what_they_share() -> None:
    """A page that lacks its keys in layer 2, and values of twice their strength in layer 1, at a step that reads the
    page in both layers first."""

    def empty(cache: Cache) -> None:
        cache.keys[2][2 * PAGE : 3 * PAGE] = 0

    def double(cache: Cache) -> None:
        cache.values[1][2 * PAGE : 3 * PAGE] *= 2

    start = next(
        start
        for start in range(4, 16)
        if 2 * PAGE + 1
        in {each.positions[2] for each in reads(ALPHABET, walk_question(1, range(61), start=start).ids, 9)}
    )
    question = walk_question(1, range(61), start=start)
    keys, values = (said_over(question, 1, damage) for damage in (empty, double))
    assert keys == values
    (wrong,) = judged(exchange(question, tokens=keys)).wrong
    assert places_found(wrong) == (None, 2)
    assert {(each["layer"], each["page"]) for each in finding(wrong).minimal["suspects"]} >= {(1, 2), (2, 2)}
    assert "no single layer" in wrong.message


def test_a_node_that_is_found_nowhere_names_no_page_though_another_request_points_to_it() -> None:
    """Both may have hit a prefix that is all another request's."""
    one, two = (walk_question(number, NODES, start=3, count=20) for number in (1, 2))
    lost = (ALPHABET.lost(0, None),) * 20
    for wrong in judged(exchange(one, tokens=lost), exchange(two, tokens=lost)).wrong:
        assert finding(wrong).page is None and wrong.unnamed is not None and wrong.unnamed in wrong.message
        assert wrong.places[0].page == page_of(one, 0, 0)


def lost_at(number: int, layer: int, position: int) -> Exchange:
    """A walk that is lost in that layer in the middle of its answer, as it comes to that position."""
    start = next(
        start
        for start in range(121)
        if reads(ALPHABET, walk_question(1, NODES[:121], start=start).ids, 7)[6].positions[layer] == position
    )
    question = walk_question(number, NODES[:121], start=start, count=20)
    return exchange(question, tokens=with_token(question, 6, ALPHABET.lost(layer, None)))


def test_requests_that_share_a_page_settle_its_layer_between_them() -> None:
    """One comes to the page by keys of layer 2 alone; the other by values of layer 1 as well."""
    sure, unsure = lost_at(1, 2, 3 * PAGE), lost_at(2, 2, 3 * PAGE + 1)
    assert finding(judged(unsure).wrong[0]).layer is None
    both = judged(sure, unsure).wrong
    assert [places_found(each) for each in both] == [(2, 3)] * 2


def test_two_requests_that_find_no_node_of_a_page_name_it_where_both_were_right_before() -> None:
    both = judged(lost_at(1, 0, 3 * PAGE), lost_at(2, 0, 3 * PAGE + 1)).wrong
    assert [places_found(each) for each in both] == [(0, 3)] * 2
    assert finding(judged(lost_at(1, 0, 3 * PAGE)).wrong[0]).page is None


def test_a_fault_of_a_page_that_others_share_is_not_preferred_to_one_of_the_own_page() -> None:
    """Each request can have a fault of its own, as where a server damages many."""
    apart = [walk_question(number, NODES[:60] + NODES[60 * number : 60 * number + 61], start=57) for number in (1, 2)]
    lost = ALPHABET.lost(2, None)
    for wrong in judged(*(exchange(each, tokens=with_token(each, 1, lost)) for each in apart)).wrong:
        read = page_of(apart[wrong.request - 1], 1, 2)
        assert finding(wrong).layer in (None, 2) and finding(wrong).page in (None, read)


def test_a_right_step_clears_no_page_that_another_request_begins_alike() -> None:
    """The other request shares the walk up to the first token of a page: with its page, that one is right."""
    cut, one = 2 * PAGE + 1, walk_question(1, range(61), start=1)
    two = walk_question(2, [*range(cut - 2), *range(100, 100 + 63 - cut)])
    read = [each.positions[2] or 0 for each in reads(ALPHABET, one.ids, 20)]
    step = next(i for i, at in enumerate(read) if at >= cut)
    assert step > 1 and read[step - 1] == 2 * PAGE
    tokens = with_token(one, step, ALPHABET.lost(2, None))
    alone, beside = (judged(exchange(one, tokens=tokens), *more).wrong[0] for more in ((), (exchange(two),)))
    assert places_found(alone) == (1, 2)
    assert places_found(beside) == (None, 2)
