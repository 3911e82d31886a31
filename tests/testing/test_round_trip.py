"""check_round_trip: bad pools that it has to find, with buffer, layer, row and owner; and legal ones that stay green.

Invariants:
- Each rule has a pool that breaks it and nothing else.
- A legal pool is judged: a call that returns has compared words of every buffer.
"""

from __future__ import annotations

from collections import deque, namedtuple
from functools import reduce
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from rigs.own_pools import SLOTS, Paged, PagedWithoutIndex, Pool, judged

from kvcheck.testing import IntegrityError, NotJudged, check_round_trip

SEEDS = range(6)


def found(pool: Any, **options: Any) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught:
        judged(pool, **options)
    return caught.value


# What has to be found


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


class KeepsNumpy(Pool):
    """The saved value is numpy's view of the pool: torch does not see that it is one storage."""

    def save(self, ids: Any) -> Any:
        rows = [each[ids] for each in self.buffers()]
        return [self.k_scale[0].numpy()[int(ids[0]) : int(ids[-1]) + 1], rows]


def test_memory_that_torch_sees_as_another_storage_is_found_by_its_change() -> None:
    (finding,) = found(KeepsNumpy(), ids=[5, 6], into=[8, 9]).findings
    assert finding.code == "KV305" and "copy[0]" in finding.message


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


# What is legal


class Dictionaries:
    """Tensors in mappings, nested objects, named tuples and slots of classes."""

    class Layer:
        __slots__ = ("scale",)

        def __init__(self) -> None:
            self.scale = torch.zeros(SLOTS, 3)

    Pair = namedtuple("Pair", "k v")

    def __init__(self) -> None:
        self.caches = {f"model.layers.{at}": self.Pair(torch.zeros(SLOTS, 4), torch.zeros(SLOTS, 4)) for at in range(2)}
        self.layers = [self.Layer(), self.Layer()]
        self.owner = self  # a circle
        self.ring = deque([torch.zeros(SLOTS, 2)])
        self.mock = MagicMock()

    def buffers(self) -> list[torch.Tensor]:
        pairs = [each for pair in self.caches.values() for each in pair]
        return [*pairs, *(each.scale for each in self.layers), *self.ring]

    save, load = Pool.save, Pool.load


class LayersFirst:
    """[k or v, layer, slot, ...] in one tensor."""

    def __init__(self) -> None:
        self.kv = torch.zeros(2, 3, SLOTS, 4)

    def save(self, ids: Any) -> Any:
        return self.kv[:, :, ids]

    def load(self, copy: Any, ids: Any) -> None:
        self.kv[:, :, ids] = copy


class Interleaved(Pool):
    """Keys and values are views of one memory, neither contiguous; the memory itself is kept too."""

    def __init__(self) -> None:
        self.both = torch.zeros(SLOTS, 2, 2, 8)
        self.k, self.v, self.k_scale = [self.both[:, 0]], [self.both[:, 1]], []


class Transposed(Pool):
    """[dim, slot] in memory, [slot, dim] for its users."""

    def __init__(self) -> None:
        self.k, self.v = [torch.zeros(7, SLOTS).t()], [torch.zeros(5, SLOTS, dtype=torch.int16).t()]
        self.k_scale = [torch.zeros(SLOTS * 2)[::2]]


class PinnedHost(Pool):
    """Saves to host memory that is made once, pinned where there is a device."""

    def save(self, ids: Any) -> Any:
        copies = []
        for each in self.buffers():
            host = torch.empty(len(ids), *each.shape[1:], dtype=each.dtype, pin_memory=torch.cuda.is_available())
            copies.append(host.copy_(each[ids], non_blocking=True))
        return copies


class CopiesASlice(Pool):
    """Copies neighbouring slots to the host, which is a copy for a pool on a device."""

    def save(self, ids: Any) -> Any:
        if not torch.equal(ids.diff(), torch.ones(len(ids) - 1, dtype=ids.dtype)):
            return super().save(ids)
        first, last = int(ids[0]), int(ids[-1]) + 1
        buffers = self.buffers()
        return [buffers[0][first:last].cpu(), *(each[first:last].to("cpu", non_blocking=True) for each in buffers[1:])]


def test_a_copy_to_the_host_is_a_copy_also_on_a_cpu() -> None:
    assert judged(CopiesASlice(), ids=[5, 6, 7]).reads


class OnePad(Pool):
    """Pads with slot 0, which it writes."""

    def load(self, copy: Any, ids: Any) -> None:
        padded = torch.cat((ids, ids.new_zeros(3)))
        super().load([torch.cat((rows, rows[-1:].expand(3, *rows.shape[1:]))) for rows in copy], padded)


class FreesAtOnce(Pool):
    """Clears the slots of a request once it is saved."""

    def save(self, ids: Any) -> Any:
        copy = super().save(ids)
        for each in self.buffers():
            each[ids] = 0
        return copy


class NewTensors(Pool):
    """load makes new tensors and writes none in place."""

    def load(self, copy: Any, ids: Any) -> None:
        rows = iter(copy)
        for name in ("k", "v", "k_scale"):
            setattr(self, name, [each.index_copy(0, ids, next(rows)) for each in getattr(self, name)])


class ByWayOfFloat(Pool):
    """Saves in a wider type, which keeps every number."""

    def save(self, ids: Any) -> Any:
        return [rows.float() for rows in super().save(ids)]

    def load(self, copy: Any, ids: Any) -> None:
        super().load([rows.to(each.dtype) for rows, each in zip(copy, self.buffers(), strict=True)], ids)


class KeepsItsPool(Pool):
    """What is saved knows its pool and the pool's own tensors."""

    def save(self, ids: Any) -> Any:
        return {"pool": self, "into": self.k, "rows": super().save(ids), "ids": ids}

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy["rows"], ids)


class Numpy(Pool):
    def save(self, ids: Any) -> Any:
        return [rows.view(torch.uint8).numpy() for rows in super().save(ids)]

    def load(self, copy: Any, ids: Any) -> None:
        super().load([torch.from_numpy(r).view(e.dtype) for r, e in zip(copy, self.buffers(), strict=True)], ids)


class WithIdLists(Pool):
    """A free list, lengths and flags, a slot each; a table of another size in one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.free = torch.arange(SLOTS)
        self.used = torch.zeros(SLOTS, dtype=torch.bool)
        self.inv_freq = torch.zeros(32)
        self.host_names = np.array(["a"])


class Complex(Pool):
    def __init__(self) -> None:
        self.k, self.v = [torch.zeros(SLOTS, 3, dtype=torch.complex64)], [torch.zeros(SLOTS, 3, dtype=torch.bool)]
        self.k_scale = []


LEGAL = (Dictionaries, LayersFirst, Interleaved, Transposed, PinnedHost, OnePad, FreesAtOnce, NewTensors, ByWayOfFloat)
LEGAL += (KeepsItsPool, Numpy, WithIdLists, Complex, Pool)


@pytest.mark.parametrize("kind", LEGAL, ids=lambda kind: kind.__name__)
def test_a_legal_pool_is_green_and_judged(kind: type) -> None:
    for seed in SEEDS:
        result = judged(kind(), seed=seed)
        assert min(result.words.values()) > 0 and not result.findings


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32),
        *(torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    ],
    ids=str,
)
def test_every_type_is_judged(dtype: torch.dtype) -> None:
    for seed in SEEDS:
        result = judged(Pool(dtype), seed=seed)
        assert set(result.words) == {"k", "v", "k_scale", "saved"}


class PagedHeadsFirst(Paged):
    """[page, head, token, dim], as attention kernels like it, and one memory for all layers."""

    def __init__(self) -> None:
        super().__init__()
        self.latent = torch.zeros(2, 13, 3, 16, 6)


@pytest.mark.parametrize("kind", [Paged, PagedHeadsFirst])
def test_a_legal_pool_with_pages_is_green(kind: type) -> None:
    for seed in SEEDS:
        result = judged(kind(), slots=13 * 16, page_size=16, seed=seed)
        assert {"index_k", "latent"} <= {name.partition("[")[0] for name in result.words}


class Blocks(Pool):
    """Ids are blocks, as vLLM numbers them; what is given are lists of numbers."""

    def save(self, ids: Any) -> Any:
        assert type(ids) is list
        return super().save(ids)


def test_ids_are_made_as_the_caller_wants_and_called_what_he_calls_them() -> None:
    assert judged(Blocks(), as_ids=list).reads
    pool = Blocks()
    pool.buffers = lambda: [*pool.k, *pool.v]  # type: ignore[method-assign]
    assert "block " in found(pool, as_ids=list, unit="block").findings[1].message


class Scratch(Pool):
    """A staging buffer with a row a slot, which load uses as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = torch.zeros(SLOTS, 4)

    def load(self, copy: Any, ids: Any) -> None:
        self.staging.fill_(7)
        super().load(copy, ids)


@pytest.mark.parametrize("name", ["staging", "stag*"])
def test_scratch_memory_that_is_excluded_by_name_is_not_accused(name: str) -> None:
    result = judged(Scratch(), exclude=(name,))
    assert result.not_tried == ("staging: excluded by name",) and "staging" not in result.words
    assert {each.buffer for each in found(Scratch()).findings} == {"staging"}, "otherwise it is a buffer as all others"


# What cannot be judged


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
        (Pool(), {"page_size": 16}, "multiple of page_size="),
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


def test_what_was_not_tried_is_in_the_result() -> None:
    result = judged(WithIdLists())
    assert {each.partition(":")[0] for each in result.not_tried} == {"free", "used", "inv_freq"}
    assert "include='free' judges it" in str(result)
    assert "free" in found(WithIdLists(), include=("free",)).findings[0].message


def test_an_error_of_the_callers_code_stays_his() -> None:
    pool = Pool()
    pool.load = lambda copy, ids: 1 / 0  # type: ignore[assignment]
    with pytest.raises(ZeroDivisionError):
        judged(pool)


def test_equal_seeds_give_equal_findings_and_others_other_slots() -> None:
    texts = [str(found(WithoutScale(), seed=seed)) for seed in (0, 0, 1, 2, 3)]
    assert texts[0] == texts[1] and len(set(texts)) == 4
