"""The content rule: a word says whose it is, and only at its own place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcheck.core.base import content
from kvcheck.core.base.content import Site, Tag
from kvcheck.kernels.content import as_signed, low_half, mix64_int, mix64_torch, rows_torch, unmix64_int

U64 = st.integers(0, (1 << 64) - 1)
REQUESTS, POSITIONS, WORDS = 12, 64, 20
TAGS = st.builds(Tag, st.integers(1, REQUESTS), st.just(0), st.integers(0, POSITIONS - 1))
SITE = Site("full", "index_k_with_scale", "key", 3)
ELSEWHERE = {
    "another space": replace(SITE, space="window"),
    "another buffer": replace(SITE, buffer="latent"),
    "another piece": replace(SITE, piece="scale"),
    "the next layer": replace(SITE, layer=4),
    "the layer before": replace(SITE, layer=2),
    "layer 0": replace(SITE, layer=0),
}


def rows_of(request: int, site: Site, dtype: torch.dtype = torch.int64, words: int = WORDS) -> torch.Tensor:
    """Rows of the positions 0 .. POSITIONS - 1 of a request: [POSITIONS, words]."""
    return rows_torch(codes_of(request), content.mask(site, words), dtype)


def codes_of(request: int) -> torch.Tensor:
    """Codes of the positions 0 .. POSITIONS - 1 of a request."""
    return content.codes(np.full(POSITIONS, request, dtype=np.int64), np.arange(POSITIONS, dtype=np.int64))


def test_mix64_is_the_finaliser_of_splitmix64() -> None:
    """The first outputs for seed 0, which finalises multiples of the golden constant."""
    values = [0, 0x9E3779B97F4A7C15, 0x3C6EF372FE94F82A, 0xDAA66D2C7DDF743F]
    mixed = [0, 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64_int(value) for value in values] == mixed


@given(st.lists(U64, min_size=1, max_size=20))
def test_mixing_is_undone_and_the_same_for_tensors(values: list[int]) -> None:
    mixed = [mix64_int(value) for value in values]
    assert [unmix64_int(value) for value in mixed] == values
    assert [mix64_int(unmix64_int(value)) for value in values] == values
    assert mix64_torch(torch.tensor([*map(as_signed, values)])).tolist() == [*map(as_signed, mixed)]


@given(TAGS, st.integers(0, WORDS - 1), st.integers(0, 100))
def test_a_word_decodes_to_its_tag_at_its_own_place(tag: Tag, index: int, layer: int) -> None:
    site = replace(SITE, layer=layer)
    assert content.decode(content.word(tag, site, index), site, index, requests=REQUESTS) == tag


@given(TAGS, st.integers(0, WORDS - 1))
def test_rows_hold_the_words_of_the_rule(tag: Tag, index: int) -> None:
    row = rows_of(tag.request, SITE)[tag.position]
    assert row[index].item() == content.word(tag, SITE, index)
    code = codes_of(tag.request)[tag.position].item()
    assert (code == content.codes_of(tag.request)) == (tag.position == 0)


@pytest.mark.parametrize("place", ELSEWHERE)
@given(tag=TAGS, index=st.integers(0, WORDS - 1))
def test_a_word_that_lies_elsewhere_carries_no_tag(place: str, tag: Tag, index: int) -> None:
    word = content.word(tag, SITE, index)
    assert content.decode(word, ELSEWHERE[place], index, requests=1 << 20) is None
    assert content.decode_half(low(word), ELSEWHERE[place], index, requests=REQUESTS, positions=POSITIONS) is None


@given(TAGS, st.integers(1, WORDS - 1), st.sampled_from([-1, 1]))
def test_a_word_that_is_off_by_one_carries_no_tag(tag: Tag, index: int, by: int) -> None:
    word = content.word(tag, SITE, index)
    assert content.decode(word, SITE, index + by, requests=1 << 20) is None
    assert content.decode_half(low(word), SITE, index + by, requests=REQUESTS, positions=POSITIONS) is None


@given(TAGS, st.integers(0, WORDS - 1), st.integers(0, 63))
def test_a_word_with_one_flipped_bit_carries_no_tag(tag: Tag, index: int, bit: int) -> None:
    flipped = as_signed((content.word(tag, SITE, index) ^ (1 << bit)) & ((1 << 64) - 1))
    assert content.decode(flipped, SITE, index, requests=REQUESTS) is None


@pytest.mark.parametrize("tag", [Tag(0, 0, 5), Tag(REQUESTS + 1, 0, 5), Tag(1, 1, 5), Tag(1, 0, 1 << 22)])
def test_a_tag_of_no_request_attempt_or_position_of_the_run_is_not_believed(tag: Tag) -> None:
    assert content.decode(content.word(tag, SITE, 0), SITE, 0, requests=REQUESTS) is None


@pytest.mark.parametrize("index", [0, 1, WORDS])
def test_poison_carries_no_tag(index: int) -> None:
    assert content.decode(content.POISON_WORD, SITE, index, requests=1 << 20) is None
    assert content.decode_half(low(content.POISON_WORD), SITE, index, requests=REQUESTS, positions=POSITIONS) is None


def low(word: int) -> int:
    """The low 32 bits, signed."""
    half = word & 0xFFFFFFFF
    return half - (1 << 32) if half >> 31 else half


@given(TAGS, st.integers(0, WORDS - 1))
def test_a_half_word_is_resolved_by_trying_the_tags_of_the_run(tag: Tag, index: int) -> None:
    half = rows_of(tag.request, SITE, torch.int32)[tag.position, index].item()
    assert half == low(content.word(tag, SITE, index))
    assert content.decode_half(int(half), SITE, index, requests=REQUESTS, positions=POSITIONS) == tag
    assert content.decode_half(int(half), SITE, index, requests=tag.request - 1, positions=POSITIONS) is None


def test_half_words_are_the_low_halves_whatever_the_strides() -> None:
    words = torch.tensor([[0x1122334455667788, -1], [0x7FFFFFFF00000001, as_signed(0x0000000080000000)]])
    assert low_half(words).tolist() == [[0x55667788, -1], [1, -(1 << 31)]]
    assert low_half(words.t()).tolist() == [[0x55667788, 1], [-1, -(1 << 31)]]
    assert low_half(words).dtype is torch.int32
    assert low_half(words[:1, 1:].view(-1)).tolist() == low_half(words.t()[1, ::2]).tolist() == [-1]


def test_all_words_of_a_run_are_distinct() -> None:
    rows = [rows_of(request, site) for request in (1, 2) for site in (SITE, *ELSEWHERE.values())]
    words = torch.cat(rows).flatten().tolist()
    assert len(set(words)) == len(words) == 2 * 7 * POSITIONS * WORDS
