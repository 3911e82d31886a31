"""check_round_trip: bad pools that it has to find, with buffer, layer, row and owner."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, PagedWithoutIndex, Pool, found, judged

from kvcheck.testing.plan import ids_text


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
    assert "layers 0, 1" in cause.message and f"row {cause.row} with request 3's bytes" in cause.message
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


class KeepsViews(Pool):
    def save(self, ids: Any) -> Any:
        first, last = int(ids[0]), int(ids[-1])
        return {"k": [each[first : last + 1] for each in self.k], "rest": [each[ids] for each in self.buffers()[2:]]}


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


class ReadsTheWholePool(Pool):
    """load reads the rows from the pool itself."""

    def save(self, ids: Any) -> Any:
        return {"ids": ids.clone(), "k": self.k, "v": [each[:] for each in self.v]}

    def load(self, copy: Any, ids: Any) -> None:
        for each in self.buffers():
            each[ids] = each[copy["ids"]]


def test_memory_of_the_pool_in_the_saved_value_is_named_beside_the_finding() -> None:
    error = found(ReadsTheWholePool())
    (told,) = error.judged.not_tried
    assert {each.code for each in error.findings} == {"KV102"} and told.startswith("copy.k[0], copy.k[1], copy.v[0]")


class KeepsNumpy(Pool):
    """The saved value is numpy's view of the pool, which torch takes for another storage."""

    def save(self, ids: Any) -> Any:
        rows = [each[ids] for each in self.buffers()]
        return [self.k_scale[0].numpy()[int(ids[0]) : int(ids[-1]) + 1], rows]


class WritesBesides(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        self.v[1][12] = 0


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


class SwapsLayers(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load([copy[1], copy[0], *copy[2:]], ids)


class HalfRows(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.buffers(), copy, strict=True):
            if each.dim() == 3:
                each[ids, :1] = rows[:, :1]
            else:
                each[ids] = rows


class OnlyTheFirst(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows[:-1] for rows in copy], ids[:-1])


# Kind of the pool, options, what each finding has, and words of the message.
IDS = {"ids": [5, 6, 7], "into": [8, 9, 10]}
# Kind of the pool, what every finding has, and words of the message.
WRONG: dict[str, tuple[type[Pool], dict[str, object], str]] = {
    "a forgotten layer": (WithoutLastLayer, {"buffer": "v", "layer": 1}, "v, layer 1:"),
    "a saved view": (KeepsViews, {"code": "KV305", "buffer": "k", "row": 5, "seen_request": 3}, "copy.k[0] shares its"),
    "memory that torch sees as another storage": (KeepsNumpy, {"code": "KV305", "buffer": "k_scale"}, "copy[0]"),
    "a row of somebody else": (WritesBesides, {"code": "KV403", "buffer": "v", "layer": 1, "row": 12}, "which request"),
    "rows of other positions": (Reversed, {"code": "KV301"}, "of its position 2, meant for row 10; expected"),
    "rows of another layer": (SwapsLayers, {"code": "KV106", "buffer": "k"}, "of k, layer 1"),
    "half a row": (HalfRows, {"code": "KV103"}, "words of request 1 and request 3"),
    "no last row": (OnlyTheFirst, {"code": "KV102", "row": 10}, "1 of 3 rows"),
}


@pytest.mark.parametrize("name", WRONG)
def test_each_finding_has_the_code_and_the_place(name: str) -> None:
    kind, expected, words = WRONG[name]
    error = found(kind(), **IDS)
    assert [{key: getattr(each, key) for key in expected} for each in error.findings] == [expected] * len(
        error.findings
    )
    assert words in str(error)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_buffer_with_a_row_a_page_is_found(seed: int) -> None:
    error = found(PagedWithoutIndex(), slots=13 * 16, page_size=16, seed=seed)
    assert {each.buffer for each in error.findings} == {"index_k"} and error.findings[0].code == "KV304"
    assert "page " in error.findings[0].message and "token" not in error.findings[0].message
    assert "called  save([*range(" in str(error), "ids of tokens"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([5], "[5]"),
        ([5, 6, 9, 8], "[5, 6, 9, 8]"),
        ([*range(32, 48), 7, 1, 2, 3], "[*range(32, 48), 7, *range(1, 4)]"),
        ([*range(0, 60, 2)], "[0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... 30 ids]"),
    ],
)
def test_ids_are_printed_as_python_and_never_at_any_length(ids: list[int], text: str) -> None:
    assert ids_text(ids) == text


@pytest.mark.parametrize("kind", [WithoutScale, KeepsViews, Reversed, WritesBesides])
def test_a_finding_has_the_calls_that_were_made_until_then(kind: type[Pool]) -> None:
    error = found(kind(), ids=[5, 6, 7], into=[8, 10, 9])
    calls = {(each.minimal or {})["called"] for each in error.findings}
    assert calls == {"save([*range(5, 8)])" + ("" if kind is KeepsViews else "; load(copy, [8, 10, 9])")}
    assert f"called  {calls.pop()}" in str(error)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16])
def test_a_scale_a_token_that_is_forgotten_is_found_however_small(dtype: torch.dtype) -> None:
    pool = WithoutScale()
    pool.k_scale = [torch.zeros(SLOTS).to(dtype) for _ in range(2)]
    assert {found(pool, seed=seed).findings[0].code for seed in SEEDS} == {"KV304"}


def test_equal_seeds_give_equal_findings_and_others_other_slots() -> None:
    texts = [str(found(WithoutScale(), seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 4


class ShiftedSave(Pool):
    def save(self, ids: Any) -> Any:
        return super().save(ids + 1)


class ShiftedLoad(Pool):
    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids + 1)


@pytest.mark.parametrize(
    ("kind", "code", "place"),
    [
        (ShiftedSave, "KV102", "from page 8, one beside page 7"),
        (ShiftedLoad, "KV403", "meant for page 40, one beside page 41"),
        (Reversed, "KV301", "meant for page 22"),
    ],
)
def test_a_finding_names_the_row_of_the_wrong_bytes_and_the_other_buffers(
    kind: type[Pool], code: str, place: str
) -> None:
    error = found(kind(), ids=[7, 20, 30], into=[40, 50, 22], unit="page")
    first = error.findings[0]
    assert first.code == code and place in first.message and "rows" not in first.message
    assert "also    5 more of this code and cause: k, v, k_scale\n" in str(error)


def test_an_index_error_of_ids_that_are_pages_has_the_way_to_make_them() -> None:
    pool = Pool(slots=SLOTS)
    for each in pool.buffers():
        each.unsqueeze_(1)
    with pytest.raises(IndexError) as caught:
        judged(pool, slots=SLOTS * 4, page_size=4, exclude=("k_scale",))
    (note,) = caught.value.__notes__
    assert "as_ids=lambda ids: torch.tensor(ids[::4]) // 4" in note
    judged(pool, slots=SLOTS * 4, page_size=4, as_ids=lambda ids: torch.tensor(ids[::4]) // 4)
    with pytest.raises(IndexError) as caught:
        judged(Pool(), as_ids=lambda ids: torch.tensor(ids) + SLOTS)
    assert not hasattr(caught.value, "__notes__")
