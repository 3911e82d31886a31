"""check_round_trip: pools and calls that it cannot judge, and what it says to do about them."""

from __future__ import annotations

from functools import reduce
from typing import Any

import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, Paged, Pool, found, judged

from kvcheck.testing import NotJudged, check_round_trip


class Quantises(Pool):
    def save(self, ids: Any) -> Any:
        return [rows.to(torch.float8_e5m2) for rows in super().save(ids)]

    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows.to(each.dtype) for rows, each in zip(copy, self.buffers(), strict=True)], ids)


class StagesInside(Pool):
    """save keeps values in a buffer of the pool that has as many rows as the pool has slots."""

    def __init__(self) -> None:
        super().__init__()
        self.host = torch.zeros(SLOTS, 2)

    def save(self, ids: Any) -> Any:
        self.host[: len(ids)] = self.k_scale[0][ids]
        return super().save(ids)


class Mirror(Pool):
    """save keeps the scales in a tensor of the same size, at the slots of the request; or at the first free ones."""

    def __init__(self, is_first_fit: bool = False) -> None:
        super().__init__()
        self.is_first_fit = is_first_fit
        self.host_scale = torch.zeros(SLOTS, 2)

    def save(self, ids: Any) -> Any:
        rows = torch.arange(1, 1 + len(ids)) if self.is_first_fit else ids.clone()
        self.host_scale[rows] = self.k_scale[1][ids]
        return rows, super().save(ids)[:-1]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.buffers(), copy[1], strict=False):
            each[ids] = rows
        self.k_scale[1][ids] = self.host_scale[copy[0]]


class MirrorWithoutScale(Mirror):
    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip([*self.k, *self.v], copy[1], strict=False):
            each[ids] = rows


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_that_save_keeps_in_the_pool_are_no_finding(seed: int) -> None:
    for pool, options in ((Mirror(), {}), (Mirror(is_first_fit=True), {"ids": [1, 2, 3]})):
        with pytest.raises(NotJudged, match=r"keeps copies in host_scale, .* pass exclude=\('host_scale',\)"):
            judged(pool, seed=seed, **options)
    assert judged(Mirror(is_first_fit=True), seed=seed, exclude=("host_scale",)).reads
    error = found(MirrorWithoutScale(), seed=seed, exclude=("host_scale",))
    assert (error.findings[0].code, {each.buffer for each in error.findings}) == ("KV304", {"k_scale"})


def with_tensor(tensor: torch.Tensor) -> Pool:
    pool = Pool()
    pool.extra = tensor  # type: ignore[attr-defined]
    return pool


@pytest.mark.parametrize(
    ("pool", "options", "told"),
    [
        (Pool(), {"slots": 60}, "k[0] [61, 2, 8] has no dimension of 60 slots"),
        (object(), {"save": len, "load": len}, "no tensor below object has a dimension of 61 slots; found no tensor"),
        (with_tensor(torch.zeros(9, 9)), {}, "extra [9, 9] has no dimension of 61 slots"),
        (with_tensor(torch.zeros(SLOTS, SLOTS)), {}, "extra [61, 61] has more than one dimension"),
        (with_tensor(torch.zeros(SLOTS, 2).to_sparse()), {}, "extra is sparse_coo of float32 on cpu"),
        (with_tensor(torch.zeros(SLOTS, 2, device="meta")), {}, "extra is float32 on meta"),
        (with_tensor(torch.zeros(SLOTS, 1).expand(SLOTS, 4)), {}, "extra is expanded"),
        (reduce(lambda inner, _: [inner], range(50), Pool()), {"save": len, "load": len}, "40 objects deep"),
        (Quantises(), {}, "copy to a narrower type"),
        (StagesInside(), {}, "of host, which request 2 owns. If save keeps values there"),
        (Pool(), {"exclude": ("kk",)}, "the pool has k, v, k_scale"),
        (Pool(), {"exclude": "k_scale"}, "expected a tuple of names"),
        (Pool(), {"ids": [0, 1]}, "is padding"),
        (Pool(), {"ids": [1, 61]}, "none of 61 slots"),
        (Pool(), {"ids": [1, 1]}, "each once"),
        (Pool(), {"ids": [1, 2], "into": [3]}, "got 1 and 2"),
        (Pool(), {"ids": list(range(1, 31)), "into": list(range(31, 61))}, "too few"),
        (with_tensor(torch.zeros(SLOTS, 2, dtype=torch.complex64).conj()), {}, "extra is a view whose bytes are not"),
        (Pool(), {"slots": "61"}, "expected slots= as a whole number, got '61'"),
        (Pool(), {"slots": 61.0}, "expected slots= as a whole number, got 61.0"),
        (Pool(), {"page_size": 16}, "multiple of page_size="),
        (Paged(), {"slots": 208, "page_size": 16, "unit": "page"}, "unit='page': expected page_size=1"),
        (Paged(), {"slots": 208, "page_size": 16, "ids": list(range(20, 36))}, "whole pages of 16"),
    ],
)
def test_what_cannot_be_judged_is_said_with_what_to_do(pool: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(NotJudged) as caught:
        check_round_trip(
            pool,
            **{"save": getattr(pool, "save", None), "load": getattr(pool, "load", None), "slots": SLOTS} | options,
        )
    assert told in str(caught.value)


def test_an_error_of_the_callers_code_stays_his() -> None:
    pool = Pool()
    pool.load = lambda copy, ids: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        judged(pool)


class Aligned(Pool):
    """Rows of 16 numbers, of which 10 hold KV. saved, loaded: what save and load move."""

    def __init__(self, saved: int = 10, loaded: int = 10) -> None:
        super().__init__()
        self.saved, self.loaded = saved, loaded
        self.raw = torch.zeros(2, SLOTS, 16)

    def save(self, ids: Any) -> Any:
        return self.raw[:, ids, : self.saved], super().save(ids)

    def load(self, copy: Any, ids: Any) -> None:
        self.raw[:, ids, : self.loaded] = copy[0][..., : self.loaded]
        super().load(copy[1], ids)


class Heads(Aligned):
    """The same with two heads a row, each of them aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = torch.zeros(2, SLOTS, 2, 16)

    def save(self, ids: Any) -> Any:
        return self.raw[:, ids, :, : self.saved], Pool.save(self, ids)

    def load(self, copy: Any, ids: Any) -> None:
        self.raw[:, ids, :, : self.loaded] = copy[0][..., : self.loaded]
        Pool.load(self, copy[1], ids)


class ForgetsARow(Aligned):
    """Loads rows of 16, and of the last row only 10."""

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        self.raw[:, ids[:-1]] = copy[0][:, :-1]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_aligns_rows_is_no_finding_and_can_be_named(seed: int) -> None:
    for pool, index, told in (
        (Aligned(), slice(10, 16), "slice(10, 16)"),
        (Heads(), (slice(0, 2), slice(10, 16)), "(slice(0, 2), slice(10, 16))"),
    ):
        with pytest.raises(NotJudged) as caught:
            judged(pool, seed=seed)
        assert f"save left out {told} of each row" in str(caught.value)
        assert f"pass unused={{'raw': {told}}}" in str(caught.value)
        result = judged(pool, seed=seed, unused={"raw": index})
        assert result.not_tried == (f"raw: {told} of its rows, named in unused=",) and result.words["raw"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", [Aligned, ForgetsARow])
def test_a_part_of_a_row_that_was_saved_and_not_loaded_is_torn(kind: type[Aligned], seed: int) -> None:
    assert {(each.code, each.buffer) for each in found(kind(saved=16), seed=seed).findings} == {("KV103", "raw")}


def test_the_rest_of_the_row_is_judged() -> None:
    error = found(Aligned(loaded=8), unused={"raw": slice(10, None)})
    assert {(each.code, each.buffer) for each in error.findings} == {("KV103", "raw")}
    for unused, told in (
        ({"raw": slice(0, 16)}, "leaves nothing of raw"),
        ({"raw": (0, 0, 0)}, "no index of a row of raw"),
        ({"rows": slice(10, 16)}, "expected names of tensors"),
    ):
        with pytest.raises(NotJudged, match=told):
            judged(Aligned(), unused=unused)
