"""check_round_trip: legal pools stay green."""

from __future__ import annotations

from collections import deque, namedtuple
from collections.abc import Callable
from functools import partial, reduce
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from rigs.own_pools import SEEDS, SLOTS, Paged, Pool, found, judged

from kvcheck.testing import NotJudged


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


class ForgetsWhatItPoisons(FreesAtOnce):
    """Poisons the slots of a request once it is saved, and load leaves the scales out."""

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip([*self.k, *self.v], copy, strict=False):
            each[ids] = rows


@pytest.mark.parametrize("seed", SEEDS)
def test_a_forgotten_buffer_that_save_poisons_is_found(seed: int) -> None:
    cause = found(ForgetsWhatItPoisons(), seed=seed).findings[0]
    assert (cause.code, cause.buffer) == ("KV304", "k_scale")


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


class BytesOfNumbers(Pool):
    """Numbers of a floating type in buffers of bytes, saved by way of a wider type."""

    def __init__(self, kind: torch.dtype) -> None:
        super().__init__(torch.uint8)
        self.kind = kind
        self.k_scale = [torch.zeros(SLOTS, 2, dtype=torch.int32)]

    def save(self, ids: Any) -> Any:
        return [rows.view(self.kind).float() for rows in super().save(ids)]

    def load(self, copy: Any, ids: Any) -> None:
        numbers = [rows.to(self.kind) for rows in copy]
        super().load([rows.view(each.dtype) for rows, each in zip(numbers, self.buffers(), strict=True)], ids)


class KeepsItsPool(Pool):
    """What is saved knows its pool and the pool's own tensors."""

    def save(self, ids: Any) -> Any:
        return {"pool": self, "into": self.k, "rows": super().save(ids), "ids": ids}

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy["rows"], ids)


class KeepsDestinations(Pool):
    """What is saved has views of each buffer, to load to."""

    def save(self, ids: Any) -> Any:
        return [(each.view(SLOTS, -1), each[ids]) for each in self.buffers()]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in copy:
            each[ids] = rows.reshape(len(rows), -1)


class LayersAsDestinations(LayersFirst):
    """Views of one tensor: of layers, and of all of it as rows of another shape."""

    def save(self, ids: Any) -> Any:
        return self.kv.view(6, -1), [(layer, layer[:, ids]) for layer in self.kv.unbind(0)]

    def load(self, copy: Any, ids: Any) -> None:
        for layer, rows in copy[1]:
            layer[:, ids] = rows


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


LEGAL: dict[str, Callable[[], Any]] = {
    kind.__name__: kind
    for kind in (
        *(Complex, Dictionaries, LayersFirst, Interleaved, Transposed, PinnedHost, OnePad, FreesAtOnce, NewTensors),
        *(ByWayOfFloat, KeepsDestinations, LayersAsDestinations, KeepsItsPool, Numpy, WithIdLists, Pool),
    )
} | {f"bytes of {kind}": partial(BytesOfNumbers, kind) for kind in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_pool_is_green_and_judged(name: str) -> None:
    for seed in SEEDS:
        result = judged(LEGAL[name](), seed=seed)
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


def test_what_was_not_tried_is_in_the_result() -> None:
    result = judged(WithIdLists())
    assert {each.partition(":")[0] for each in result.not_tried} == {"free", "used", "inv_freq"}
    assert "include='free' judges it" in str(result)
    assert "free" in found(WithIdLists(), include=("free",)).findings[0].message


class KeepsTheLastCopy(Pool):
    """An attribute that is None until load keeps a tensor there; and a list of many linked nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.head: Any = reduce(lambda tail, _: [tail, torch.zeros(3, 3)], range(60), None)

    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        self.last = copy[0]


def test_what_is_excluded_need_not_be_a_tensor_yet_and_is_not_entered() -> None:
    for names in (("last", "head"), ("la*", "head*")):
        result = judged(KeepsTheLastCopy(), exclude=names)
        assert result.not_tried == ("last: excluded by name", "head: excluded by name")
        assert set(result.words) == {"k", "v", "k_scale", "saved"}
    with pytest.raises(NotJudged, match=r"objects deep; .* leave out what leads there with exclude="):
        judged(KeepsTheLastCopy(), exclude=("last",))
    with pytest.raises(NotJudged, match=r"expected names of tensors"):
        judged(KeepsTheLastCopy(), exclude=("lasts", "head"))
