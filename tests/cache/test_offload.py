"""Retract and resume: what is saved is restored word for word, in every space, and nobody else's rows are touched.

Invariants:
- Which rows are a request's own is worked out here from its pages, not asked of the pool.
- Every word of a pool is distinct before a save, and every word is another one before a restore.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kvcheck.core.base.errors import DoubleFree, LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.offload import Offload, OffloadedKV
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

Words = dict[tuple[str, str], torch.Tensor]
PAGES = 16


def lengths(name: str) -> list[int]:
    """One token, a page, two pages, and a token to either side."""
    size = shape(name).page_size
    return [1, size - 1, size, size + 1, 2 * size, 2 * size + 1]


CASES = [(name, tokens) for name in TINY_SHAPES for tokens in lengths(name)] + [
    ("gpt-oss-tiny", tokens)
    for tokens in (12, 13, 14, 16, 17, 20, 21, 25)  # some window pages have been passed
]


def pool_of(name: str) -> tuple[KVPool, Offload, EagerBackend]:
    """A pool of a tiny shape with room for a request and its successor, and its offload."""
    backend = EagerBackend()
    preset = shape(name)
    window_pages = PAGES if preset.window_layers else 0
    sizes = PoolSizes(pages=PAGES, requests=4, max_tokens=8 * preset.page_size, window_pages=window_pages)
    pool = KVPool(preset, sizes, backend=backend)
    return pool, Offload(pool, backend), backend


def holding_of(pool: KVPool, request: int, tokens: int) -> Holding:
    """A holding of `tokens` committed tokens that has room for the next one, as a decoding request has."""
    holding = pool.open(request)
    assert holding is not None
    assert pool.grow(holding, tokens + 1, query=tokens)
    pool.evict_window(holding, tokens)
    pool.commit(holding, tokens)
    return holding


def shuffle_free_pages(pool: KVPool) -> None:
    """Turn the order of the free pages round, so that the next holding has descending ones."""
    for space in ("full", "window"):
        if space in pool.allocators:
            ids = pool.allocators[space].allocate(pool.allocators[space].available, 99)
            assert ids is not None
            pool.allocators[space].free(ids[::-1].copy())


def live_words(pool: KVPool) -> Words:
    """The pool's own words."""
    return {(space, each.name): pool.sets[space].write_view(each.name) for space, each in pool.buffers()}


def copies(words: Words) -> Words:
    """Words as they are now."""
    return {key: each.clone() for key, each in words.items()}


def write_distinct(words: Words, start: int) -> None:
    """start, start + 1, ... through all buffers."""
    for each in words.values():
        each.copy_(torch.arange(start, start + each.numel()).view(each.shape))
        start += each.numel()


def own_rows(pool: KVPool, holding: Holding, space: str, buffer: BufferSpec, tokens: int) -> list[int]:
    """Rows of the first `tokens` tokens in logical order: live pages only."""
    size = pool.page_size
    if space == "state":
        return [holding.state_slot]
    pages = (holding.window_pages if space == "window" else holding.pages).tolist()
    if buffer.rows is Granularity.PAGE:
        return [pages[at] for at in range(-(-tokens // size)) if pages[at]]
    return [pages[at // size] * size + at % size for at in range(tokens) if pages[at // size]]


def differing(got: Words, expected: Words) -> list[tuple[str, str, int, int]]:
    """(space, buffer, layer, row) of every row that is not bit for bit as expected."""
    found = []
    for (space, name), words in got.items():
        for layer, row in torch.nonzero((words != expected[space, name]).any(-1)).tolist():
            found.append((space, name, layer, row))
    return found


@pytest.mark.parametrize("chunk_rows", [8192, 3])
@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_a_request_comes_back_word_for_word_into_other_pages_and_nothing_else_changes(
    name: str, tokens: int, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcheck.core.cache.offload.CHUNK_ROWS", chunk_rows)
    pool, offload, _ = pool_of(name)
    old = holding_of(pool, 1, tokens)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    value = offload.save(old)
    assert differing(words, before) == []
    shuffle_free_pages(pool)
    new = holding_of(pool, 1, tokens)
    pool.commit(new, 0)
    write_distinct(words, -(1 << 40))
    expected = copies(words)
    for space, buffer in pool.buffers():
        source = own_rows(pool, old, space, buffer, tokens)
        target = own_rows(pool, new, space, buffer, tokens)
        assert len(source) == len(target) > 0
        assert not set(source) & set(target)
        expected[space, buffer.name][:, target] = before[space, buffer.name][:, source]
    offload.restore(value, new)
    assert differing(words, expected) == []
    assert all(torch.equal(words[key], expected[key]) for key in words)
    assert new.committed == 0, "whoever waits for the restore commits"


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_a_saved_value_is_whole_typed_and_holds_the_requests_own_rows_only(name: str, tokens: int) -> None:
    pool, offload, _ = pool_of(name)
    holding = holding_of(pool, 1, tokens)
    words = live_words(pool)
    write_distinct(words, 1)
    value = offload.save(holding)
    assert (value.request, value.tokens, value.shape_name) == (1, tokens, name)
    assert [(kept.space, kept.name) for kept in value.buffers] == list(words)
    for kept, (space, buffer) in zip(value.buffers, pool.buffers(), strict=True):
        rows = own_rows(pool, holding, space, buffer, tokens)
        assert torch.equal(kept.words, words[space, buffer.name][:, rows])
        assert kept.words.shape[1] == len(rows)


@pytest.mark.parametrize(("tokens", "start"), [(9, 0), (12, 0), (13, 1), (17, 2), (25, 4)])
def test_a_value_says_at_which_page_its_window_starts(tokens: int, start: int) -> None:
    pool, offload, _ = pool_of("gpt-oss-tiny")
    value = offload.save(holding_of(pool, 1, tokens))
    assert value.window_start == start
    window = [kept.words.shape[1] for kept in value.buffers if kept.space == "window"]
    assert window == [tokens - 4 * start] * 2


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_saved_value_is_memory_of_its_own(name: str) -> None:
    pool, offload, _ = pool_of(name)
    holding = holding_of(pool, 1, pool.page_size + 1)
    words = live_words(pool)
    write_distinct(words, 1)
    value = offload.save(holding)
    kept = [each.words.clone() for each in value.buffers]
    pool.close(holding)
    write_distinct(words, -(1 << 40))
    assert all(torch.equal(each.words, old) for each, old in zip(value.buffers, kept, strict=True))
    for each in value.buffers:
        start = each.words.data_ptr()
        stop = start + each.words.numel() * 8
        for owned in pool.sets.values():
            assert all(stop <= low or high <= start for low, high in owned.storage_ranges().values())


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_one_value_can_be_restored_twice(name: str) -> None:
    pool, offload, _ = pool_of(name)
    tokens = pool.page_size + 1
    old = holding_of(pool, 1, tokens)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    value = offload.save(old)
    for _ in range(2):
        new = holding_of(pool, 1, tokens)
        write_distinct(words, -(1 << 40))
        offload.restore(value, new)
        for space, buffer in pool.buffers():
            target = own_rows(pool, new, space, buffer, tokens)
            source = own_rows(pool, old, space, buffer, tokens)
            assert torch.equal(words[space, buffer.name][:, target], before[space, buffer.name][:, source])


def broken_values(value: OffloadedKV) -> list[OffloadedKV]:
    """The value without each of its buffers in turn, and as another shape's."""
    missing = [value.buffers[:at] + value.buffers[at + 1 :] for at in range(len(value.buffers))]
    return [*(replace(value, buffers=buffers) for buffers in missing), replace(value, shape_name="another")]


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_without_one_of_the_buffers_is_refused_before_anything_is_written(name: str) -> None:
    pool, offload, _ = pool_of(name)
    tokens = pool.page_size + 1
    value = offload.save(holding_of(pool, 1, tokens))
    new = holding_of(pool, 1, tokens)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    for broken in broken_values(value):
        with pytest.raises(LayoutMismatch, match="restore of request 1: expected the buffers"):
            offload.restore(broken, new)
    assert differing(words, before) == []


@pytest.mark.parametrize("name", [name for name in TINY_SHAPES if len(shape(name).full_layers) > 1])
def test_buffers_in_another_order_are_refused(name: str) -> None:
    pool, offload, _ = pool_of(name)
    value = offload.save(holding_of(pool, 1, 3))
    swapped = replace(value, buffers=(*value.buffers, value.buffers[0]))
    with pytest.raises(LayoutMismatch):
        offload.restore(swapped, holding_of(pool, 1, 3))
    if len(value.buffers) > 1:
        with pytest.raises(LayoutMismatch):
            offload.restore(replace(value, buffers=value.buffers[::-1]), holding_of(pool, 1, 3))


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_that_does_not_fit_the_new_pages_is_refused_before_anything_is_written(name: str) -> None:
    pool, offload, _ = pool_of(name)
    size = pool.page_size
    value = offload.save(holding_of(pool, 1, 2 * size + 1))
    new = pool.open(1)
    assert new is not None
    assert pool.grow(new, 2 * size, query=0)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    with pytest.raises(LengthMismatch, match=f"request 1: {2 * size + 1} tokens do not fit 2 pages of {size}"):
        offload.restore(value, new)
    assert differing(words, before) == []
    assert new.committed == 0


def test_a_window_of_another_length_is_refused_with_both_lengths() -> None:
    pool, offload, _ = pool_of("gpt-oss-tiny")
    value = offload.save(holding_of(pool, 1, 17))
    new = pool.open(1)
    assert new is not None
    assert pool.grow(new, 17, query=0)  # nothing has been passed: five window pages instead of three
    with pytest.raises(LengthMismatch, match="was live from page 2, that of the new holding is from page 0"):
        offload.restore(value, new)


def test_a_value_of_another_length_is_refused_before_its_first_buffer_is_written() -> None:
    pool, offload, _ = pool_of("glm-5.1-tiny")
    value = offload.save(holding_of(pool, 1, 3))
    last = value.buffers[-1]
    short = replace(value, buffers=(*value.buffers[:-1], replace(last, words=last.words[:, :-1])))
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    with pytest.raises(LengthMismatch, match=f"restore {last.space}.{last.name} of request 1"):
        offload.restore(short, holding_of(pool, 1, 3))
    assert differing(words, before) == []


@pytest.mark.parametrize(("name", "tokens"), CASES)
def test_discarding_gives_all_host_memory_back_once(name: str, tokens: int) -> None:
    pool, offload, backend = pool_of(name)
    holding = holding_of(pool, 1, tokens)
    before = backend.allocated()
    values = [offload.save(holding), offload.save(holding)]
    taken = {key: size for key, size in backend.allocated().items() if key not in before}
    expected = sum(
        len(pool.sets[space].spec.layers) * len(own_rows(pool, holding, space, buffer, tokens)) * buffer.row_bytes
        for space, buffer in pool.buffers()
    )
    assert sum(taken.values()) == 2 * expected
    offload.discard(values[0])
    assert sum(backend.allocated().values()) - sum(before.values()) == expected
    offload.discard(values[1])
    assert backend.allocated() == before
    with pytest.raises(DoubleFree):
        offload.discard(values[0])


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_pages_grown_for_the_next_token_are_neither_saved_nor_written(name: str) -> None:
    pool, offload, _ = pool_of(name)
    tokens = pool.page_size  # the next token has a page of its own
    old, new = holding_of(pool, 1, tokens), holding_of(pool, 1, tokens)
    assert (len(old.pages), len(new.pages)) == (2, 2)
    value = offload.save(old)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    offload.restore(value, new)
    for space, buffer in pool.buffers():
        own = own_rows(pool, new, space, buffer, tokens)
        others = np.setdiff1d(np.arange(words[space, buffer.name].shape[1]), own)
        key = (space, buffer.name)
        assert torch.equal(words[key][:, others], before[key][:, others])
        assert not (words[key][:, own] == before[key][:, own]).all()


def test_a_window_with_a_hole_is_refused_before_anything_is_made_for_it() -> None:
    told: list[str] = []

    class Told:
        """Notes what is handed out."""

        def allocated(self, space: str, ids: IndexArray, owner: int) -> None:
            told.append(space)

        def freed(self, space: str, ids: IndexArray) -> None:
            told.append(space)

    pool, _, backend = pool_of("gpt-oss-tiny")
    holding = holding_of(pool, 1, 2 * pool.page_size)
    holding.window_pages = np.array([int(holding.window_pages[0]), 0])
    before = backend.allocated()
    with pytest.raises(LengthMismatch, match="window pages to be gone from the front only"):
        Offload(pool, backend, listener=Told()).save(holding)
    assert (told, backend.allocated()) == ([], before)
