"""Retract and resume: what is saved is restored word for word, in every space, and nobody else's rows are touched."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvcheck.core.base.errors import DoubleFree, LayoutMismatch, LengthMismatch
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
    return {(space, each.name): pool.sets[space].write_view(each.name) for space, each in pool.buffers()}


def copies(words: Words) -> Words:
    return {key: each.clone() for key, each in words.items()}


def write_distinct(words: Words, start: int) -> None:
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
    for start in (-(1 << 40), -(1 << 41)):  # a value may be restored twice
        write_distinct(words, start)
        expected = copies(words)
        for space, buffer in pool.buffers():
            source = own_rows(pool, old, space, buffer, tokens)
            target = own_rows(pool, new, space, buffer, tokens)
            assert len(source) == len(target) > 0
            assert not set(source) & set(target)
            expected[space, buffer.name][:, target] = before[space, buffer.name][:, source]
        offload.restore(value, new)
        assert differing(words, expected) == []
    assert new.committed == 0, "whoever waits for the restore commits"


def broken_values(value: OffloadedKV) -> list[OffloadedKV]:
    """The value without each of its buffers in turn, with one twice, in another order, of a row less, and another's."""
    buffers, last = value.buffers, value.buffers[-1]
    lists = [buffers[:at] + buffers[at + 1 :] for at in range(len(buffers))]
    lists += [(*buffers, buffers[0]), (*buffers[:-1], replace(last, words=last.words[:, :-1]))]
    lists += [buffers[::-1]] if len(buffers) > 1 else []
    return [*(replace(value, buffers=each) for each in lists), replace(value, shape_name="another")]


@pytest.mark.parametrize("name", TINY_SHAPES)
def test_a_value_of_other_buffers_is_refused_before_anything_is_written(name: str) -> None:
    pool, offload, _ = pool_of(name)
    tokens = pool.page_size + 1
    value = offload.save(holding_of(pool, 1, tokens))
    new = holding_of(pool, 1, tokens)
    words = live_words(pool)
    write_distinct(words, 1)
    before = copies(words)
    for broken in broken_values(value):
        with pytest.raises((LayoutMismatch, LengthMismatch)):
            offload.restore(broken, new)
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
