"""check_round_trip: bad pools that it has to find, with buffer, layer, row and owner.

Invariants:
- Each rule has a pool that breaks it and nothing else.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, PagedWithoutIndex, Pool, found


class WithoutScale(Pool):
    def buffers(self) -> list[torch.Tensor]:
        return [*self.k, *self.v]


class WithoutLastLayer(Pool):
    def buffers(self) -> list[torch.Tensor]:
        return [*self.k, self.v[0], *self.k_scale]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_buffer_is_not_moved_and_holds_the_next_owners_bytes(seed: int) -> None:
    error = found(WithoutScale(), seed=seed)
    cause = error.findings[0]
    assert (cause.code, cause.buffer, cause.layer, cause.request, cause.seen_request) == ("KV304", "k_scale", 0, 1, 3)
    assert {(each.code, each.layer, each.cause) for each in error.findings[1:]} == {
        ("KV102", layer, cause.id) for layer in (0, 1)
    }
    assert "k_scale, layers 0, 1: load left all" in cause.message
    assert f"token {cause.row} with request 3's bytes (its position" in cause.message
    assert {each.buffer for each in error.findings} == {"k_scale"}, "nothing else is accused"


class BytesWithoutScale(Pool):
    def buffers(self) -> list[torch.Tensor]:
        return [each.view(torch.uint8) for each in (*self.k, *self.v)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_buffer_of_bytes_names_the_next_owner(seed: int) -> None:
    pool = BytesWithoutScale(torch.uint8)
    pool.k_scale = [torch.zeros(SLOTS, 4, dtype=torch.uint8)]
    cause = found(pool, seed=seed).findings[0]
    assert (cause.code, cause.buffer, cause.seen_request) == ("KV304", "k_scale", 3)


def test_a_forgotten_layer_is_named() -> None:
    cause = found(WithoutLastLayer()).findings[0]
    assert (cause.code, cause.buffer, cause.layer) == ("KV304", "v", 1)
    assert "v, layer 1:" in cause.message


class KeepsViews(Pool):
    def save(self, ids: Any) -> Any:
        first, last = int(ids[0]), int(ids[-1])
        return {"k": [each[first : last + 1] for each in self.k], "rest": [each[ids] for each in self.buffers()[2:]]}


def test_a_saved_view_is_aliasing_and_names_the_next_owner() -> None:
    error = found(KeepsViews(), ids=[5, 6, 7], into=[8, 9, 10])
    assert {(each.code, each.buffer, each.row, each.request, each.seen_request) for each in error.findings} == {
        ("KV305", "k", 5, 1, 3)
    }
    assert "copy.k[0] shares its memory with token 5 of k, layer 0, which request 3 owns now" in str(error)
    assert "seen " in str(error) and "wanted " in str(error)


class KeepsViewsOfRows(Pool):
    """A view of each row of the request, besides views of whole buffers that say where to load to."""

    def save(self, ids: Any) -> Any:
        return [(each.view(SLOTS, -1), [each[int(number)] for number in ids]) for each in self.buffers()]


@pytest.mark.parametrize("seed", SEEDS)
def test_views_of_the_saved_rows_are_aliasing_beside_views_to_load_to(seed: int) -> None:
    error = found(KeepsViewsOfRows(), seed=seed)
    assert {each.code for each in error.findings} == {"KV305"}
    assert not any("[0][0] " in each.message for each in error.findings), "a view of the whole buffer is no copy"


class ReadsTheWayBack(Pool):
    """load reads the rows from the view of the buffer, which the next owner has written by then."""

    def save(self, ids: Any) -> Any:
        return [each.view(SLOTS, -1) for each in self.buffers()], ids.clone()

    def load(self, copy: Any, ids: Any) -> None:
        for each in copy[0]:
            each[ids] = each[copy[1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_view_of_the_pool_that_is_read_as_the_copy_is_found(seed: int) -> None:
    codes = {each.code for each in found(ReadsTheWayBack(), seed=seed).findings}
    assert codes <= {"KV102", "KV304"} and "KV102" in codes


class KeepsNumpy(Pool):
    """The saved value is numpy's view of the pool, which torch takes for another storage."""

    def save(self, ids: Any) -> Any:
        rows = [each[ids] for each in self.buffers()]
        return [self.k_scale[0].numpy()[int(ids[0]) : int(ids[-1]) + 1], rows]


def test_memory_that_torch_sees_as_another_storage_is_found_with_its_row() -> None:
    (finding,) = found(KeepsNumpy(), ids=[5, 6], into=[8, 9]).findings
    assert (finding.code, finding.buffer, finding.row) == ("KV305", "k_scale", 5) and "copy[0]" in finding.message


class WritesBesides(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        self.v[1][5] = 0


def test_a_row_of_somebody_else_that_changed_is_a_foreign_write() -> None:
    (finding,) = found(WritesBesides(), ids=[8, 9], into=[10, 11]).findings
    assert (finding.code, finding.buffer, finding.layer, finding.row, finding.request) == ("KV403", "v", 1, 5, 1)
    assert "token 5 of v, layer 1, which request" in finding.message and finding.seen_request in (2, 3)


class RestoresToTheOldSlots(Pool):
    def save(self, ids: Any) -> Any:
        self.ids = ids.clone()
        return super().save(ids)

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, self.ids)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restore_into_the_old_slots_is_a_foreign_write_and_moves_nothing(seed: int) -> None:
    codes = {each.code for each in found(RestoresToTheOldSlots(), seed=seed, include=()).findings}
    assert "KV403" in codes and codes <= {"KV403", "KV304", "KV102", "KV301"}


class Reversed(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows.flip(0) for rows in copy], ids)


def test_rows_of_other_positions_are_a_mismatch_of_positions() -> None:
    error = found(Reversed(), ids=[3, 4, 5, 6], into=[10, 11, 12, 13])
    assert {each.code for each in error.findings} == {"KV301"}
    assert "token 10 of k, layer 0, holds the row of its position 3; expected request 1, position 0; 4 of 4" in str(
        error
    )


class SwapsLayers(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load([copy[1], copy[0], *copy[2:]], ids)


def test_rows_of_another_layer_are_misplaced() -> None:
    error = found(SwapsLayers())
    assert {(each.code, each.buffer) for each in error.findings} == {("KV106", "k")}
    assert "the row of request 1, position 0, of k, layer 1" in str(error)


class HalfRows(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.buffers(), copy, strict=True):
            if each.dim() == 3:
                each[ids, :1] = rows[:, :1]
            else:
                each[ids] = rows


def test_half_a_row_is_torn() -> None:
    error = found(HalfRows(), ids=[3, 4], into=[10, 11])
    assert {each.code for each in error.findings} == {"KV103"}
    assert "a torn row with words of request 1 and request 3" in str(error)


class OnlyTheFirst(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows[:-1] for rows in copy], ids[:-1])


def test_a_missing_last_row_is_foreign_bytes() -> None:
    error = found(OnlyTheFirst(), ids=[3, 4], into=[10, 11])
    assert {(each.code, each.row) for each in error.findings} == {("KV102", 11)} and "1 of 2 rows" in str(error)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_buffer_with_a_row_a_page_is_found(seed: int) -> None:
    error = found(PagedWithoutIndex(), slots=13 * 16, page_size=16, seed=seed)
    assert {each.buffer for each in error.findings} == {"index_k"} and error.findings[0].code == "KV304"
    assert "page " in error.findings[1].message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_a_scale_a_token_that_is_forgotten_is_found_however_small(dtype: torch.dtype) -> None:
    pool = Pool()
    pool.k_scale = [torch.zeros(SLOTS).to(dtype) for _ in range(2)]
    pool.buffers = lambda: [*pool.k, *pool.v]  # type: ignore[method-assign]
    options = {"include": ("k_scale",)} if dtype is torch.int32 else {}
    for seed in SEEDS:
        assert found(pool, seed=seed, **options).findings[0].code == "KV304"


def test_equal_seeds_give_equal_findings_and_others_other_slots() -> None:
    texts = [str(found(WithoutScale(), seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 4
