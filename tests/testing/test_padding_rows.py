"""check_round_trip: rows of padding that are written are named, and NaN in rows that save reads is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, Paged, found, judged

WHOLE, LAST = 8, SLOTS - 1
IDS = {"ids": [3, 9, 27], "into": [40, 8, 51]}
NAN = float("nan")


class Padded:
    """Writes batches that are filled up to eight rows, at slot `pad`, with `value`."""

    def __init__(self, *, pad: int = 0, value: float = NAN, dtype: torch.dtype = torch.float16, width: int = 4) -> None:
        self.pad, self.value = pad, value
        self.rows = [torch.zeros(SLOTS, width, dtype=dtype) for _ in range(2)]

    def at(self, ids: Any) -> Any:
        return torch.cat((ids, ids.new_full((-len(ids) % WHOLE,), self.pad)))

    def save(self, ids: Any) -> Any:
        return [each[ids] for each in self.rows]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows, copy, strict=True):
            self.put(each, self.at(ids), torch.cat((rows, rows.new_full((-len(ids) % WHOLE, 4), self.value))))

    def put(self, each: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
        each[at] = rows


class Masked(Padded):
    """Legal: rows of padding are dropped."""

    def put(self, each: torch.Tensor, at: torch.Tensor, rows: torch.Tensor) -> None:
        each[at[at != self.pad]] = rows[at != self.pad]


@pytest.mark.parametrize("options", [{}, {"value": 0}, {"value": 7, "dtype": torch.int32}])  # finite rows are legal
@pytest.mark.parametrize("seed", SEEDS)
def test_padding_that_load_writes_is_named(options: dict[str, Any], seed: int) -> None:
    (told,) = judged(Padded(**options), seed=seed).not_tried
    assert told.startswith("rows[0], rows[1]: row 0 is padding, and load changed it")
    assert ("NaN" in told) == (not options) and "padding=()" in told


@pytest.mark.parametrize(("pad", "padding"), [(0, (0,)), (LAST, (LAST,)), (LAST, (-1,))])
def test_padding_that_is_left_alone_is_not_named(pad: int, padding: tuple[int, ...]) -> None:
    for seed in SEEDS:
        assert judged(Masked(pad=pad), padding=padding, seed=seed).not_tried == ()


def test_the_advice_that_is_printed_finds_it() -> None:
    assert {each.code for each in found(Padded(), padding=(), **IDS).findings} == {"KV403"}
    assert judged(Masked(), padding=(), **IDS).not_tried == ()
    assert "padding=(-1,)" not in str(found(Padded(), padding=(), **IDS))
    assert "padding=(-1,)" in str(found(Padded(pad=LAST), **IDS)), "the option that reserves the last slot"


@pytest.mark.parametrize("padding", [(LAST,), (-1,), (0, LAST)])
@pytest.mark.parametrize("pad", [LAST, -1])
def test_the_last_slot_may_be_padding(pad: int, padding: tuple[int, ...]) -> None:
    (told,) = judged(Padded(pad=pad), padding=padding).not_tried
    assert f"row {LAST} is padding" in told


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_row_is_somebodys_where_nobody_says_otherwise(seed: int) -> None:
    assert {each.row for each in found(Padded(pad=-1), seed=seed, **IDS).findings} == {LAST}


class ReadsPadding(Padded):
    """Saves with rows of padding, and loads without them."""

    def save(self, ids: Any) -> Any:
        return [each[self.at(ids)] for each in self.rows]

    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows[: len(ids)] for rows in copy], ids)


class WritesBack(ReadsPadding):
    """Legal: what was read of padding is written there again."""

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows, copy, strict=True):
            each[self.at(ids)] = rows


@pytest.mark.parametrize("seed", SEEDS)
def test_nan_in_padding_that_save_reads_is_found_and_finite_rows_are_not(seed: int) -> None:
    error = found(ReadsPadding(), seed=seed)
    assert {(each.code, each.buffer, each.row) for each in error.findings} == {("KV403", "rows", 0)}
    assert judged(WritesBack(), seed=seed).not_tried == ()
    assert len(judged(ReadsPadding(value=0), seed=seed).not_tried) == 1


class Bytes(ReadsPadding):
    """Rows of a narrow floating type, whose NaN is a byte."""

    def __init__(self, value: float = NAN) -> None:
        super().__init__(value=value, dtype=torch.float8_e4m3fn, width=8)

    def save(self, ids: Any) -> Any:
        return [each.view(torch.uint8)[self.at(ids)] for each in self.rows]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows, copy, strict=True):
            rows[len(ids) :] = 0x7F if self.value else 0
            each.view(torch.uint8)[self.at(ids)] = rows


def test_rows_of_any_floating_type_are_looked_at() -> None:
    for pool in (Bytes(), ReadsPadding(dtype=torch.complex64)):
        error = found(pool)
        assert {each.code for each in error.findings} == {"KV403"} and "not judged" not in str(error)
        assert error.judged.not_tried == ()
    assert len(judged(Bytes(value=0)).not_tried) == 1


class AnotherSlot(ReadsPadding):
    """Legal: padded reads have slot 0, and NaN goes to the last slot."""

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows, copy, strict=True):
            each[ids], each[-1] = rows[: len(ids)], self.value


class OneByte(Padded):
    """Legal: NaN in a scale of one byte, which save does not read. Its former content stands in the saved value."""

    def __init__(self) -> None:
        self.rows = [torch.zeros(SLOTS, 1, dtype=torch.float8_e5m2), torch.zeros(SLOTS, 256, dtype=torch.uint8)]

    def save(self, ids: Any) -> Any:
        return [each.view(torch.uint8)[ids] for each in self.rows]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.rows, copy, strict=True):
            each.view(torch.uint8)[ids] = rows
        self.rows[0].view(torch.uint8)[0] = 0x7F


def test_nan_in_a_row_that_save_does_not_read_is_named_alone() -> None:
    for seed in SEEDS:
        (told,) = judged(AnotherSlot(), padding=(0, LAST), seed=seed).not_tried
        assert f"row {LAST} is padding" in told and "NaN" in told
        (told,) = judged(OneByte(), seed=seed).not_tried
        assert told.startswith("rows[0]: row 0 is padding") and "NaN" in told


class SaveWrites(Padded):
    def save(self, ids: Any) -> Any:
        copy = super().save(ids)
        self.rows[1][0] = 1
        return copy

    load = Masked.load
    put = Masked.put


class PageZero(Paged):
    """A row of page 0, and the row that page 0 has in another buffer."""

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        self.latent[1, 0, 5] = float("inf")
        self.index_k[0][0] = 9


def test_who_wrote_is_said_and_pages_of_several_rows_are_padding_whole() -> None:
    (told,) = judged(SaveWrites()).not_tried
    assert told.startswith("rows[1]: row 0 is padding, and save changed it")
    index, latent = sorted(judged(PageZero(), slots=208, page_size=16).not_tried)
    assert index.startswith("index_k[0]: page 0 is padding") and latent.startswith("latent[1]: token 5 is padding")
    assert judged(Paged(), slots=208, page_size=16).not_tried == ()
