"""Memory in the terms of footprints: the places of an allocation, and those that a footprint holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.cache.backend.backend import Footprint
from kvcheck.core.cache.hicache.host_pool import layout_axes
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape

Places = npt.NDArray[np.bool_]


class Masks:
    """The places of one layer, [units, tokens], for the last rows and spans: the layers of a pass share these."""

    def __init__(self) -> None:
        self._last: deque[tuple[NamedAllocation, Footprint, Places]] = deque(maxlen=LAST_MASKS)

    def of(self, memory: NamedAllocation, footprint: Footprint) -> Places:
        for of, seen, places in self._last:
            if of is memory and seen.rows is footprint.rows and seen.spans is footprint.spans:
                return places
        places = self._made(memory, footprint)
        self._last.append((memory, footprint, places))
        return places

    def _made(self, memory: NamedAllocation, footprint: Footprint) -> Places:
        places = np.zeros((memory.units, memory.tokens), dtype=np.bool_)
        units = footprint.rows - memory.first
        is_here = (units >= 0) & (units < memory.units)
        if footprint.spans is None or memory.tokens == 1:
            places[units[is_here]] = True
            return places
        for unit, (start, stop) in zip(units[is_here].tolist(), footprint.spans[is_here].tolist(), strict=True):
            places[unit, start:stop] = True
        return places


LAST_MASKS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedAllocation:
    """An allocation: places [layers, units, tokens], all of one size.

    buffer: None if the space has this memory alone. first: id of the first unit. outermost: the dimension, counted from
    the outermost, of layers, units and tokens.
    """

    space: str
    buffer: str | None
    layers: int
    units: int
    tokens: int = 1
    first: int = 0
    outermost: tuple[int, int, int] = (0, 1, 2)

    @property
    def lengths(self) -> tuple[int, int, int]:
        return self.layers, self.units, self.tokens

    def named(self, footprints: Sequence[Footprint], masks: Masks) -> Places:
        places = np.zeros(self.lengths, dtype=np.bool_)
        for footprint in footprints:
            if self.is_named(footprint):
                places[slice(*footprint.layers)] |= masks.of(self, footprint)
        return places.transpose(self._axes).reshape(-1)

    @property
    def name(self) -> str:
        return self.space if self.buffer is None else f"{self.space}.{self.buffer}"

    def is_named(self, footprint: Footprint) -> bool:
        """Whether the footprint names this buffer, or a part of its rows as "buffer/rank"."""
        if footprint.space != self.space:
            return False
        return self.buffer is None or any(name.partition("/")[0] == self.buffer for name in footprint.buffers)

    def beyond(self, footprint: Footprint) -> tuple[int, int, int] | None:
        """The first span of a footprint that leaves its unit, as unit, start and stop."""
        if footprint.spans is None or self.tokens == 1:
            return None
        starts, stops = footprint.spans[:, 0], footprint.spans[:, 1]
        outside = np.flatnonzero((starts < 0) | (starts > stops) | (stops > self.tokens))
        if not len(outside):
            return None
        at = int(outside[0])
        return int(footprint.rows[at]), int(starts[at]), int(stops[at])

    def at(self, place: int) -> tuple[int, int, int]:
        numbers = np.unravel_index(place, [self.lengths[axis] for axis in self._axes])
        layer, unit, token = (int(numbers[at]) for at in self.outermost)
        return layer, unit, token

    @property
    def _axes(self) -> list[int]:
        return sorted(range(3), key=lambda axis: self.outermost[axis])


Naming = Callable[[str, Sequence[int]], NamedAllocation | None]
"""The memory for an allocation of that name and shape; None if footprints name it by the allocation's own name."""


def naming(shape: ModelShape) -> Naming:
    buffers = {
        (spec.name, buffer.name): (len(spec.layers), buffer.rows is Granularity.TOKEN)
        for spec in POOLS.load(shape.family)(shape)
        for buffer in spec.buffers
    }

    def name_memory(name: str, lengths: Sequence[int]) -> NamedAllocation | None:
        rank, colon, plain = name.rpartition(":")
        scope = rank + colon  # of a rank of a pair, which names its spaces and its memory alike
        match plain.split("."):
            case ["device", space, buffer] if (space, buffer) in buffers:
                layers, is_token = buffers[space, buffer]
                tokens = shape.page_size if is_token else 1
                units = lengths[1] // tokens
                return NamedAllocation(space=scope + space, buffer=buffer, layers=layers, units=units, tokens=tokens)
            case ["host", layout, space, buffer] if (space, buffer) in buffers:
                layers, units, tokens = (lengths[axis] for axis in layout_axes(layout))
                return NamedAllocation(
                    space=f"{scope}host.{space}",
                    buffer=buffer,
                    layers=layers,
                    units=units,
                    tokens=tokens,
                    outermost=layout_axes(layout),
                )
            case ["table", table] if len(lengths) == 2:
                return NamedAllocation(
                    space=f"{scope}table", buffer=table, layers=1, units=lengths[0], tokens=lengths[1]
                )
            case ["offload", number, space, buffer] if (space, buffer) in buffers:
                return NamedAllocation(
                    space=f"{scope}host.offload",
                    buffer=f"{space}.{buffer}",
                    layers=lengths[0],
                    units=1,
                    first=int(number),
                )
        return None

    return name_memory


def by_own_name(name: str, lengths: Sequence[int]) -> NamedAllocation:
    return NamedAllocation(space=name, buffer=None, layers=1, units=lengths[0] if lengths else 1)
