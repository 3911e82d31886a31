"""The lifetime oracle: it tracks the owner and the pending operations of every page and slot.

Invariants:
- An operation names ids that are allocated when it is submitted.
- An operation for requests (a pass, a backup, a load, a put, a get) writes only ids of its request, which are freed
  only after it has completed.
- An operation for no request (a state copy, a clear) may be pending when its ids are freed: the ordering oracle judges
  the next owner.
- The first clear of a pool, tables and seals are exempt: a space has lifetimes from its first allocation on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Completed, Footprint, Submitted
from kvcheck.core.cache.events import Allocated, Freed
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle, tier_of, unit_text

_NOBODY = 0


class _Space:
    def __init__(self) -> None:
        self.is_allocated = False
        self.owner: IndexArray = np.zeros(64, dtype=np.int64)
        self.pending: IndexArray = np.zeros(64, dtype=np.int64)

    def reach(self, highest: int) -> None:
        if highest >= len(self.owner):
            extra = np.zeros(highest + 1 + len(self.owner), dtype=np.int64)
            self.owner = np.concatenate((self.owner, extra))
            self.pending = np.concatenate((self.pending, extra))


class LifetimeOracle(Oracle):
    name = "lifetime"

    def __init__(self) -> None:
        super().__init__()
        self._spaces: dict[str, _Space] = {}
        self._pending: dict[int, tuple[str, list[tuple[str, IndexArray]]]] = {}

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Allocated, self._allocated),
            (Freed, self._freed),
            (Submitted, self._submitted),
            (Completed, self._completed),
        )

    def _space(self, name: str) -> _Space:
        space = self._spaces.get(name)
        if space is None:
            space = self._spaces[name] = _Space()
        return space

    def _allocated(self, event: Allocated) -> None:
        space = self._space(event.space)
        ids = list(event.ids)
        space.reach(max(ids, default=0))
        for twice in _repeated(ids):
            self._add("KV402", event.space, twice, event.owner, "was handed out twice at once")
        for taken in (i for i in ids if space.owner[i] != _NOBODY):
            self._add(
                "KV402", event.space, taken, event.owner, f"was handed out while request {space.owner[taken]} holds it"
            )
        space.owner[ids] = event.owner
        space.is_allocated = True

    def _freed(self, event: Freed) -> None:
        space = self._space(event.space)
        ids = list(event.ids)
        self.judged += len(ids)
        space.reach(max(ids, default=0))
        for twice in _repeated(ids):
            self._add("KV402", event.space, twice, None, "was freed twice at once")
        for unit in ids:
            if space.owner[unit] == _NOBODY:
                self._add("KV402", event.space, unit, None, "was freed though it is not allocated")
            elif space.pending[unit]:
                owner = int(space.owner[unit])
                name = self._user(event.space, unit)
                self._add("KV202", event.space, unit, owner, f"was freed while {name} of it was pending")
        space.owner[ids] = _NOBODY

    def _submitted(self, event: Submitted) -> None:
        named: list[tuple[str, IndexArray]] = []
        for footprints, writing in ((event.reads, False), (event.writes, True)):
            self._check(event, footprints, writing, named)
        if named:
            self._pending[event.ordinal] = (event.name, named)

    def _check(
        self, event: Submitted, footprints: Sequence[Footprint], writing: bool, named: list[tuple[str, IndexArray]]
    ) -> None:
        for footprint in footprints:
            ids = footprint.rows
            space = self._space(footprint.space)
            if not len(ids) or (footprint.owners is None and not space.is_allocated):
                continue
            space.reach(int(ids.max()))
            self.judged += len(ids)
            owners = space.owner[ids]
            verb = "writes" if writing else "reads"
            if _NOBODY in owners.tolist():  # of few ids, faster than numpy's own way
                unit = int(ids[owners == _NOBODY][0])
                self._add("KV202", footprint.space, unit, None, f"is free, yet {event.name} {verb} it")
            if footprint.owners is None:
                continue
            if writing and (wrong := (owners != footprint.owners) & (owners > 0)).any():
                unit, writer = int(ids[wrong][0]), int(footprint.owners[wrong][0])
                text = f"belongs to request {int(owners[wrong][0])}, yet {event.name} writes it for request {writer}"
                self._add("KV403", footprint.space, unit, writer, text)
            space.pending[ids] += 1
            named.append((footprint.space, ids))

    def _completed(self, event: Completed) -> None:
        _, named = self._pending.pop(event.ordinal, ("", []))
        for name, ids in named:
            self._space(name).pending[ids] -= 1

    def _user(self, space: str, unit: int) -> str:
        for name, named in self._pending.values():
            if any(each == space and unit in ids for each, ids in named):
                return name
        return "an operation"

    def _add(self, code: str, space: str, unit: int, request: int | None, story: str) -> None:
        self.add(code, f"{unit_text(space, unit)} {story}", tier=tier_of(space), page=unit, request=request)


def _repeated(ids: list[int]) -> list[int]:
    return [unit for unit in dict.fromkeys(ids) if ids.count(unit) > 1] if len(set(ids)) < len(ids) else []
