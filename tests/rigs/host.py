"""A host pool beside device memory full of distinct words, and what both must hold afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Place
from kvcheck.core.cache.backend.eager import EagerBackend
from kvcheck.core.cache.hicache.host_pool import HostPool
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSet, Granularity, SpaceSpec
from kvcheck.core.stress.workload.shapes import TINY_SHAPES, shape

POISON = -0x5A5A5A5A5A5A5A5B  # eight bytes of 0xA5
UNITS = {"full": 9, "window": 6, "state": 5}
SPACES = [(name, spec.name) for name in TINY_SHAPES for spec in POOLS.load(shape(name).family)(shape(name))]


class RecordingBackend(EagerBackend):
    """Keeps every allocation and every index tensor it handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: dict[str, torch.Tensor] = {}
        self.places: dict[str, Place] = {}
        self.indices: list[torch.Tensor] = []

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        self.memory[name], self.places[name] = super().empty(name, shape, dtype, place), place
        return self.memory[name]

    def index(self, values: IndexArray) -> torch.Tensor:
        self.indices.append(super().index(values))
        return self.indices[-1]


@dataclass(slots=True, kw_only=True)
class Rig:
    """A host pool, and device words for each space: `words` to back up, `other` to load into."""

    pool: HostPool
    backend: Any
    specs: dict[str, SpaceSpec]
    words: dict[str, dict[str, torch.Tensor]]
    other: dict[str, dict[str, torch.Tensor]]

    def buffers(self, space: str) -> list[str]:
        return [buffer.name for buffer in self.specs[space].buffers]

    def rows(self, space: str, buffer: str) -> int:
        (row,) = [each for each in self.specs[space].buffers if each.name == buffer]
        return self.pool.page_size if row.rows is Granularity.TOKEN else 1

    def backup(self, space: str, host: Sequence[int], device: Sequence[int]) -> list[ChunkWork]:
        chunks = self.pool.backup_chunks(
            space, self.buffers(space), host=ids(host), device=ids(device), words=self.words[space]
        )
        return list(chunks)

    def load(self, space: str, layer: int, host: Sequence[int], device: Sequence[int]) -> list[ChunkWork]:
        chunks = self.pool.load_chunks(
            space, self.buffers(space), layer=layer, host=ids(host), device=ids(device), words=self.other[space]
        )
        return list(chunks)


def ids(values: Sequence[int]) -> IndexArray:
    return np.array(values, dtype=np.int64)


def rig_of(
    name: str, layout: str = "layer-first", method: str = "kernel", *, backend: Backend | None = None, extra: int = 0
) -> Rig:
    """Device and host pools of a tiny shape; the device has `extra` more units than the host."""
    backend = backend or RecordingBackend()
    preset = shape(name)
    specs = POOLS.load(preset.family)(preset)
    words: dict[str, dict[str, dict[str, torch.Tensor]]] = {"device": {}, "other": {}}
    start = 1
    for label, spaces in words.items():
        for spec in specs:
            units = UNITS[spec.name] + extra
            owned = BufferSet(spec, units=units, page_size=preset.page_size, backend=backend, label=label)
            spaces[spec.name] = {each.name: owned.write_view(each.name) for each in spec.buffers}
            for view in spaces[spec.name].values():
                view.copy_(torch.arange(start, start + view.numel()).view(view.shape))
                start += view.numel()
    pool = HostPool(specs, units=UNITS, page_size=preset.page_size, layout=layout, method=method, backend=backend)
    by_name = {spec.name: spec for spec in specs}
    return Rig(pool=pool, backend=backend, specs=by_name, words=words["device"], other=words["other"])


def run(chunks: Sequence[ChunkWork]) -> None:
    for chunk in chunks:
        chunk()


def of_unit(words: torch.Tensor, unit: int, rows: int) -> torch.Tensor:
    return torch.stack([words[:, unit * rows + offset] for offset in range(rows)], dim=1)


def check_host(rig: Rig, space: str, held: dict[int, int]) -> None:
    """Host unit h holds what device unit held[h] holds; a unit that is not named was never written."""
    for name in rig.buffers(space):
        words, rows = rig.words[space][name].cpu(), rig.rows(space, name)
        for unit in range(UNITS[space]):
            got = rig.pool.unit_words(space, name, unit)
            assert got.shape == (words.shape[0], rows, words.shape[2])
            if unit in held:
                assert torch.equal(got, of_unit(words, held[unit], rows)), (space, name, unit)
            else:
                assert (got == POISON).all(), (space, name, unit)


def check_device(
    rig: Rig, space: str, held: dict[int, int], before: dict[str, torch.Tensor], layers: Sequence[int]
) -> None:
    """`other` unit d has, in those layers, what `words` unit held[d] has; everything else is as before."""
    for name in rig.buffers(space):
        rows, expected, layers = rig.rows(space, name), before[name].clone(), list(layers)
        for unit, origin in held.items():
            for offset in range(rows):
                expected[layers, unit * rows + offset] = rig.words[space][name][layers, origin * rows + offset]
        assert torch.equal(rig.other[space][name].cpu(), expected), (space, name)
