"""Words that are right at another place: the verdict names head, layer, buffer, request and position."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base.content import POISON_HALF, POISON_WORD, RowSites, Site, Tag, word
from kvcheck.core.base.deviation import Deviation, Elsewhere, Expectation, Owners, classify, origin_of
from tests.rigs.examples import examples

K = RowSites(space="full", buffer="k", piece="", layers=(0, 1), words=4, heads=2)
V = replace(K, buffer="v")
WIDE = replace(K, buffer="latent", heads=1)
WINDOW_K = replace(K, space="window", layers=(2, 3))
KEY = RowSites(space="full", buffer="index", piece="key", layers=(0, 1), words=2)
SCALES = replace(KEY, piece="scale", words=4, is_half=True)
TOPK = RowSites(space="metadata", buffer="metadata.topk_p", piece="topk_p", layers=(0,), words=8)
IDS = replace(TOPK, buffer="metadata.topk_index", piece="topk_index")
ELSEWHERE = Elsewhere(rows=(K, V, WIDE, WINDOW_K, KEY, SCALES, TOPK, IDS), requests=9, positions=128)
OWNERS = Owners(requests=1 << 20, unwritten=(POISON_WORD,), elsewhere=ELSEWHERE)
HALVES = Owners(requests=9, unwritten=(POISON_HALF,), positions=128, elsewhere=ELSEWHERE)
OWN = Expectation(request=2, author=1, position=70)
HERE = Site("full", "k", "", 1)
SECOND_RANK = replace(HERE, first_word=2)
FOREIGN_WORD = 0x0123456789ABCDEF


def words(row: RowSites, layer: int, *indices: int, owner: int = 1, position: int = 70) -> list[int]:
    """What somebody writes at these indices of a whole row."""
    return [word(Tag(owner, 0, position), row.site(layer), index) for index in indices]


def half(value: int) -> int:
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


CASES: dict[str, tuple[list[int], Site, int, str]] = {
    "another head": (words(K, 1, 2, 3), HERE, 1, "head 1"),
    "another head, on a rank": (words(K, 1, 0, 1), SECOND_RANK, 1, "head 0"),
    "another request's head": (words(K, 1, 2, 3, owner=3, position=0), HERE, 3, "head 1 of request 3, position 0"),
    "another layer": (words(K, 0, 0, 1, 2, 3, owner=3, position=5), HERE, 3, "layer 0 of request 3, position 5"),
    "another layer, on a rank": (words(K, 0, 2, 3), SECOND_RANK, 1, "layer 0"),
    "another layer and head": (words(K, 0, 2, 3), HERE, 1, "layer 0, head 1"),
    "another buffer": (words(V, 1, 0, 1, 2, 3), HERE, 1, "buffer v"),
    "another buffer and layer": (words(V, 0, 0, 1), HERE, 1, "buffer v, layer 0"),
    "another space": (words(WINDOW_K, 2, 0, 1), HERE, 1, "space window, buffer k, layer 2"),
    "another piece": (words(KEY, 1, 0, 1), HERE, 1, "buffer index.key"),
    "a row that begins elsewhere": (words(WIDE, 1, 1, 2, 3), WIDE.site(1), 1, "word 1 and those behind it"),
    "half a head off": (words(K, 1, 1, 2), HERE, 1, "word 1 and those behind it"),
    "another field": (words(TOPK, 0, 0, 1, 2, owner=4, position=0), IDS.site(0), 4, "field topk_p of request 4"),
    "one head twice": ([*words(K, 1, 0, 1)] * 2, HERE, 1, "its own row with words of head 0"),
    "heads exchanged": ([*words(K, 1, 2, 3), *words(K, 1, 0, 1)], HERE, 1, "words of head 1"),
    "beside words by no rule": ([*words(K, 0, 0, 1), FOREIGN_WORD, FOREIGN_WORD + 1], HERE, 1, "words of layer 0"),
    "beside words that nobody wrote": ([*words(K, 0, 0, 1), POISON_WORD, POISON_WORD], HERE, 1, "words of layer 0"),
    "a row of one word": (words(K, 0, 0), HERE, 1, "layer 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_words_of_another_place_are_named_by_it(case: str) -> None:
    seen, site, owner, story = CASES[case]
    found = classify(seen, site, OWN, OWNERS)
    assert (found.code, found.owner) == ("KV106", owner) and story in found.story
    assert classify(seen, site, OWN, replace(OWNERS, elsewhere=None)).code in ("KV103", "KV105")


def test_words_that_were_not_read_are_left_out() -> None:
    first, second = words(K, 0, 1, 2)
    found = classify([None, first, second, None], HERE, OWN, OWNERS)
    assert found == Deviation("KV106", 1, "the words of layer 0 of request 1, position 70")


@pytest.mark.parametrize(
    ("seen", "code"),
    [
        pytest.param([*words(K, 1, 0, 1, owner=5), *words(K, 0, 2, 3)], "KV103", id="torn, and another layer"),
        pytest.param([*words(K, 0, 0), FOREIGN_WORD], "KV105", id="one word of two"),
        pytest.param([*words(K, 0, 0), *words(V, 1, 1)], "KV105", id="two words of two places"),
        pytest.param(words(K, 0, 0, 1, owner=10), "KV105", id="of a request that the run has not"),
        pytest.param(words(K, 0, 0, 1, position=128), "KV105", id="of a position that the run has not"),
        pytest.param(words(replace(K, layers=(7,)), 7, 0, 1), "KV105", id="of a layer that the run has not"),
    ],
)
def test_words_that_do_not_agree_on_one_place_of_the_run_keep_their_code(seen: list[int], code: str) -> None:
    assert classify(seen, HERE, OWN, OWNERS).code == code


@pytest.mark.parametrize("owner", [1, 2])
def test_half_words_of_the_author_and_the_reader_are_found_elsewhere(owner: int) -> None:
    seen = [*map(half, words(SCALES, 0, 0, 1, 2, 3, owner=owner, position=9))]
    found = classify(seen, SCALES.site(1), OWN, replace(HALVES, requests=2))
    assert found == Deviation("KV106", owner, f"the words of layer 0 of request {owner}, position 9")


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([*map(half, words(SCALES, 0, 0, 1, owner=3))], id="of somebody else"),
        pytest.param([*map(half, words(SCALES, 0, 0))], id="a single one"),
        pytest.param([half(words(SCALES, 0, 0)[0]), half(words(SCALES, 0, 1, position=71)[0])], id="of two positions"),
        pytest.param([*map(half, words(KEY, 0, 0, 1))], id="of rows that have 64 bits"),
    ],
)
def test_half_words_that_two_do_not_agree_on_say_nothing(seen: list[int]) -> None:
    assert classify(seen, SCALES.site(1), OWN, replace(HALVES, requests=2)).code == "KV105"


MANY = tuple(replace(K, buffer=f"b{number}", layers=tuple(range(4)), words=256) for number in range(4))
LARGE = Elsewhere(rows=MANY, requests=200, positions=4096)
SIGNED = st.integers(-(1 << 63), (1 << 63) - 1)
SIGNED_HALF = st.integers(-(1 << 31), (1 << 31) - 1)


@examples(60)
@given(st.lists(SIGNED, min_size=1, max_size=8), st.lists(SIGNED_HALF, min_size=1, max_size=8))
def test_random_words_are_attributed_to_nobody(seen: list[int], halves: list[int]) -> None:
    assert origin_of(dict(enumerate(seen)), LARGE) is None
    rows = tuple(replace(row, words=4, is_half=True) for row in MANY[:2])
    assert origin_of(dict(enumerate(halves)), replace(LARGE, rows=rows, positions=256), halves_of=(1, 2)) is None


@examples(60)
@given(st.lists(SIGNED, min_size=4, max_size=4))
def test_random_words_in_an_own_row_are_nobodys(seen: list[int]) -> None:
    owners = replace(OWNERS, elsewhere=LARGE)
    assert classify([*words(K, 1, 0, 1), *seen[2:]], HERE, OWN, owners).code == "KV105"
    assert classify(seen, HERE, OWN, owners).code == "KV105"
