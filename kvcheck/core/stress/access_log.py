"""AccessLog: the last touches of a lane in one buffer.

Invariants:
- A footprint without spans touches the whole unit, also tokens that no footprint has named yet.
- Only the last touch of a lane is kept: a wait for it covers all earlier ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint

LOG_MAX = 512
"""Touches kept as they came; more are merged into the table, whose size is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """event: number of the other one in its lane. token: None if no footprint named it."""

    layer: int
    unit: int
    token: int | None
    event: int
    count: int


@dataclass(frozen=True, slots=True)
class _Touch:
    event: int
    layers: tuple[int, int]
    rows: IndexArray
    spans: IndexArray | None


class AccessLog:
    def __init__(self) -> None:
        self.latest = 0
        self._log: deque[_Touch] = deque()
        # [layers, units, tokens + 1]; the last column stands for every token that no span has named.
        self._last: npt.NDArray[np.int64] = np.zeros((1, 1, 1), dtype=np.int64)

    def touch(self, event: int, footprint: Footprint, *, over: int) -> None:
        """over: the last event of the lane that every process has joined."""
        while self._log and self._log[0].event <= over:
            self._log.popleft()
        self.latest = event
        rows, spans = _own(footprint.rows), None if footprint.spans is None else _own(footprint.spans)
        self._log.append(_Touch(event, footprint.layers, rows, spans))
        if len(self._log) > LOG_MAX:
            self._enter()

    def after(self, bound: int, footprint: Footprint) -> Overlap | None:
        if self.latest <= bound or not len(footprint.rows):
            return None
        self._enter()
        units, tokens = self._places(footprint.layers[1], footprint.rows, footprint.spans)
        layers = self._last[slice(*footprint.layers)]
        seen = layers[:, units] if tokens is None else layers[:, units, tokens]
        is_late = seen > bound
        if not is_late.any():
            return None
        late = np.argwhere(is_late)
        first: list[int] = late[0].tolist()
        token = first[2] if tokens is None else int(tokens[first[1]])
        return Overlap(
            layer=footprint.layers[0] + first[0],
            unit=int(units[first[1]]),
            token=token if token < self._last.shape[2] - 1 else None,
            event=int(seen.item(*first)),
            count=len(late),
        )

    def _enter(self) -> None:
        while self._log:
            touch = self._log.popleft()
            if len(touch.rows):
                units, tokens = self._places(touch.layers[1], touch.rows, touch.spans)
                layers = self._last[slice(*touch.layers)]
                if tokens is None:
                    layers[:, units] = touch.event
                else:
                    layers[:, units, tokens] = touch.event

    def _places(self, layers: int, rows: IndexArray, spans: IndexArray | None) -> tuple[IndexArray, IndexArray | None]:
        self._reach(layers, int(rows.max()) + 1, 0 if spans is None else int(spans[:, 1].max()))
        if spans is None:
            return rows, None
        starts, lengths = spans[:, 0], spans[:, 1] - spans[:, 0]
        ends = lengths.cumsum()
        tokens: IndexArray = np.arange(ends[-1]) + (starts - (ends - lengths)).repeat(lengths)
        return rows.repeat(lengths), tokens

    def _reach(self, layers: int, units: int, tokens: int) -> None:
        have = self._last.shape
        need = (max(have[0], layers), max(have[1], units), max(have[2], tokens + 1))
        if need == have:
            return
        if need[1] > have[1]:  # ids often come one by one
            need = (need[0], max(need[1], 2 * have[1]), need[2])
        grown = np.zeros(need, dtype=np.int64)
        grown[: have[0], : have[1], : have[2] - 1] = self._last[:, :, :-1]
        grown[: have[0], : have[1], have[2] - 1 :] = self._last[:, :, -1:]  # tokens named now were part of the rest
        self._last = grown


def _own(ids: IndexArray) -> IndexArray:
    """The owner of a view may change it later."""
    return ids if ids.base is None else ids.copy()
