"""KVPool: the spaces of one model's KV cache, their allocators and tables, and the holding of each request.

Invariants:
- A holding's host lists and the device tables have the same pages in the same order.
- Every method but `pages_short` raises for a closed holding, since its ids may belong to another request.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, LayoutMismatch, LengthMismatch
from kvcheck.core.base.paging import IndexArray, first_seen_page, locs_of, pages_for
from kvcheck.core.cache.backend.backend import Backend, Lane
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.allocator import IdAllocator, PageAllocator, SlotAllocator
from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.buffers import BufferSet, BufferSpec, Granularity, OpenGate, ReadGate, SpaceSpec
from kvcheck.core.cache.pools.request_table import IndexTable
from kvcheck.core.cache.pools.shape import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSizes:
    pages: int  # usable
    requests: int  # request rows
    max_tokens: int  # of the longest request
    window_pages: int = 0  # usable
    state_slots: int = 0  # for requests and cached prefixes; 0: as many as requests


def _no_pages() -> IndexArray:
    return np.zeros(0, dtype=np.int64)


# logical tokens of a request   [0 ............... shared ............. tokens)
# full pages                    [tree's pages    )[request's own pages     )
# window pages (SWA)            0 0 0 0 0 0 0 0 [live pages of the window  )
@dataclass(slots=True, kw_only=True)
class Holding:
    request: int
    row: int
    state_slot: int = 0
    shared: int = 0  # leading logical pages that the prefix tree owns
    committed: int = 0  # tokens whose KV is written or queued on the forward lane; see KVPool.commit
    pages: IndexArray = field(default_factory=_no_pages)  # by logical page
    window_pages: IndexArray = field(default_factory=_no_pages)  # by logical page; 0: gone
    is_open: bool = True  # until the pool closes it


@dataclass(frozen=True, slots=True)
class Given:
    """Logical pages of a request that the prefix tree has taken over: bool, by logical page."""

    full: npt.NDArray[np.bool_]
    window: npt.NDArray[np.bool_]

    @staticmethod
    def nothing(pages: int) -> Given:
        return Given(np.zeros(pages, dtype=bool), np.zeros(pages, dtype=bool))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Location of the first tokens of a request."""

    request: int
    tokens: int
    page_size: int
    units: Mapping[str, IndexArray]  # by space, pages or slots in logical order, without window pages that are gone

    def rows(self, space: str, buffer: BufferSpec) -> IndexArray:
        """Rows of a buffer that hold the tokens, in logical order."""
        units = self.units[space]
        if buffer.rows is not Granularity.TOKEN or not len(units):
            return units
        skipped = pages_for(self.tokens, self.page_size) - len(units)
        return locs_of(units, 0, self.tokens - skipped * self.page_size, self.page_size)


class _SpaceGate:
    """The gate of one buffer set: translates local layers to the model's."""

    def __init__(self, gate: ReadGate, layers: tuple[int, ...]) -> None:
        self._gate = gate
        self._layers = layers

    def wait(self, layer: int, lane: Lane) -> None:
        self._gate.wait(self._layers[layer], lane)

    def wait_whole(self, lane: Lane) -> None:
        self._gate.wait_whole(lane)


class KVPool:
    def __init__(
        self,
        shape: ModelShape,
        sizes: PoolSizes,
        *,
        backend: Backend,
        emit: Emit | None = None,
        buffers: type[BufferSet] = BufferSet,
        attention: type[AttentionInputs] = AttentionInputs,
    ) -> None:
        self.shape = shape
        self.sizes = sizes
        self.page_size = shape.page_size
        self.attention = attention(shape)
        self.backend = backend
        self.forward = backend.lane("forward")
        self._gate: ReadGate = OpenGate()
        self.specs: tuple[SpaceSpec, ...] = POOLS.load(shape.family)(shape)
        self.sets: dict[str, BufferSet] = {}
        self.allocators: dict[str, IdAllocator] = {"rows": SlotAllocator("rows", count=sizes.requests, emit=emit)}
        for spec in self.specs:
            slots = sizes.state_slots or sizes.requests
            units = {"full": sizes.pages, "window": sizes.window_pages, "state": slots}[spec.name]
            if units < 1:
                raise LayoutMismatch(f"space {spec.name} of {shape.name} needs at least one page or slot, got {units}")
            self.sets[spec.name] = buffers(spec, units=units, page_size=self.page_size, backend=backend)
            self.allocators[spec.name] = (
                SlotAllocator(spec.name, count=units, emit=emit)
                if spec.unit is Granularity.SLOT
                else PageAllocator(spec.name, count=units, page_size=self.page_size, emit=emit)
            )
        self.tables = {
            "req_to_token": IndexTable(
                "req_to_token", rows=sizes.requests, columns=sizes.max_tokens, backend=backend, lane=self.forward
            ),
            "full_to_window": IndexTable(
                "full_to_window", rows=0, columns=sizes.pages + 1, backend=backend, lane=self.forward
            ),
            "req_to_state": IndexTable(
                "req_to_state", rows=0, columns=sizes.requests + 1, backend=backend, lane=self.forward
            ),
        }

    def connect(self, gate: ReadGate) -> None:
        """Make all reads wait at this gate, which counts the model's layers."""
        self._gate = gate
        for spec in self.specs:
            self.sets[spec.name].connect(_SpaceGate(gate, spec.layers))

    def before_replay(self, lane: Lane) -> None:
        """Make `lane` wait, before a graph replay, for all loads that the captured reads would wait for. (mutant:
        replay-without-whole-wait)"""
        self._gate.wait_whole(lane)

    @property
    def has_window(self) -> bool:
        return "window" in self.sets

    @property
    def has_state(self) -> bool:
        return "state" in self.sets

    @property
    def paged(self) -> tuple[str, ...]:
        return ("full", "window") if self.has_window else ("full",)

    @property
    def rows_free(self) -> int:
        return self.allocators["rows"].available

    def spare(self, space: str) -> int:
        """Ids that cached prefixes may take: one state slot stays for every request that can be opened."""
        return self.allocators[space].available - (self.rows_free if space == "state" else 0)

    @property
    def pages_free(self) -> int:
        return min(self.allocators[name].available for name in self.paged)

    def buffers(self) -> tuple[tuple[str, BufferSpec], ...]:
        return tuple((spec.name, buffer) for spec in self.specs for buffer in spec.buffers)

    def open(self, request: int) -> Holding | None:
        """Allocate a row (and a zeroed state slot) for a request; None if no row is free."""
        rows = self.allocators["rows"].allocate(1, request)
        if rows is None:
            return None
        holding = Holding(request=request, row=int(rows[0]))
        if self.has_state:
            slots = self.allocators["state"].allocate(1, request)
            if slots is None:
                raise LayoutMismatch("a pool has as many state slots as request rows, yet none is free")
            holding.state_slot = int(slots[0])
            self.sets["state"].zero(holding.state_slot, self.forward)
            self.tables["req_to_state"].write(0, holding.row, slots)
        return holding

    def adopt(self, holding: Holding, pages: IndexArray, window_pages: IndexArray) -> None:
        """Start an empty holding with pages that the prefix tree owns and has locked for it.

        window_pages: by logical page, 0 if the next position does not see it; empty without window layers.
        """
        self.check_open(holding)
        self.allocators["full"].check_live(pages)
        if len(holding.pages) or len(pages) * self.page_size > self.sizes.max_tokens:
            raise LengthMismatch(
                f"request {holding.request}: expected an empty holding and at most {self.sizes.max_tokens} tokens, "
                f"got {len(pages)} shared pages of {self.page_size} for a holding of {len(holding.pages)} pages"
            )
        holding.pages = pages.copy()
        holding.window_pages = window_pages.copy()
        holding.shared = len(pages)
        self.commit(holding, len(pages) * self.page_size)
        self._write_locs(holding, 0, holding.committed)

    def pages_short(self, holding: Holding, tokens: int, *, query: int) -> dict[str, int]:
        """Missing pages, by space, before `grow` with the same arguments succeeds; only spaces that lack some."""
        short = {space: n - self.allocators[space].available for space, n in self._extra(holding, tokens, query)}
        return {space: missing for space, missing in short.items() if missing > 0}

    def grow(self, holding: Holding, tokens: int, *, query: int) -> bool:
        """Make room for `tokens` tokens in every paged space; False, with nothing changed, if a space is full.

        query: position of the next token to be computed; window pages that it cannot see are not allocated.
        """
        self.check_open(holding)
        held = min(len(holding.pages), len(holding.window_pages)) if self.has_window else len(holding.pages)
        if held * self.page_size >= tokens:
            return True
        if tokens > self.sizes.max_tokens or self.pages_short(holding, tokens, query=query):
            return False
        first = len(holding.pages)
        for space, count in self._extra(holding, tokens, query):
            ids = self._take(space, count, holding.request)
            if space == "full":
                holding.pages = np.concatenate((holding.pages, ids))
            else:
                gone = pages_for(tokens, self.page_size) - len(holding.window_pages) - count
                pad = np.zeros(max(0, gone), dtype=np.int64)
                holding.window_pages = np.concatenate((holding.window_pages, pad, ids))
                stop = len(holding.window_pages)
                self.tables["full_to_window"].assign(holding.pages[stop - count : stop], ids)
        if len(holding.pages) > first:
            self._write_locs(holding, first * self.page_size, len(holding.pages) * self.page_size)
        return True

    def commit(self, holding: Holding, tokens: int) -> None:
        """Set the committed length: work queued later on the forward lane finds the KV of the first `tokens` tokens.
        Raise LengthMismatch beyond the holding's pages."""
        self.check_open(holding)
        if not 0 <= tokens <= len(holding.pages) * self.page_size:
            raise LengthMismatch(
                f"request {holding.request}: expected 0 to {len(holding.pages) * self.page_size} committed tokens in "
                f"{len(holding.pages)} pages, got {tokens}"
            )
        holding.committed = tokens

    def evict_window(self, holding: Holding, tokens: int) -> None:
        """Free window pages that no position from `tokens` on can see."""
        self.check_open(holding)
        if not self.has_window:
            return
        passed = min(self.first_seen_page(tokens), len(holding.window_pages))
        gone = holding.window_pages[:passed]
        own = (gone > 0) & (np.arange(passed) >= holding.shared)
        if own.any():
            self.unmap_window(holding.pages[:passed][own])
            self.allocators["window"].free(gone[own])
        holding.window_pages = np.concatenate((np.zeros(passed, dtype=np.int64), holding.window_pages[passed:]))

    def map_window(self, pages: IndexArray, window_pages: IndexArray) -> None:
        self.tables["full_to_window"].assign(pages, window_pages)

    def unmap_window(self, pages: IndexArray) -> None:
        self.tables["full_to_window"].assign(pages, np.zeros_like(pages))

    def close(self, holding: Holding, *, given: Given | None = None) -> None:
        """Free the request's own ids, but not the pages that the prefix tree has taken over."""
        if not holding.is_open:
            raise DoubleFree(f"request {holding.request}: its holding (row {holding.row}) has been closed already")
        self.check_open(holding)
        count = len(holding.window_pages)
        own = np.arange(len(holding.pages)) >= holding.shared
        own_window = own[:count] & (holding.window_pages > 0)
        if given is not None:
            own, own_window = own & ~given.full, own_window & ~given.window[:count]
        freed = {"full": holding.pages[own], "rows": np.array([holding.row], dtype=np.int64)}
        if self.has_window:
            freed["window"] = holding.window_pages[own_window]
        if self.has_state:
            freed["state"] = np.array([holding.state_slot], dtype=np.int64)
        for space, ids in freed.items():
            self.allocators[space].check_freeable(ids)
            self.allocators[space].check_owned(ids, holding.request)
        if self.has_window:
            self.unmap_window(holding.pages[:count][own_window])
        for space, ids in freed.items():
            self.allocators[space].free(ids)
        holding.is_open = False

    def check_open(self, holding: Holding) -> None:
        """Raise ForeignAccess for a holding that was closed, or whose row belongs to another request."""
        owner = self.allocators["rows"].owner_of(holding.row)
        if not holding.is_open or owner != holding.request:
            whose = "nobody's" if owner is None else f"request {owner}'s"
            raise ForeignAccess(
                f"request {holding.request}: expected an open holding, got one that was closed; row {holding.row} is "
                f"{whose} now"
            )

    def first_seen_page(self, query: int) -> int:
        return first_seen_page(query, self.shape.window, self.page_size)

    def extent(self, holding: Holding, tokens: int) -> Extent:
        self.check_open(holding)
        count = pages_for(tokens, self.page_size)
        units = {"full": holding.pages[:count]}
        if self.has_window:
            window = holding.window_pages[:count]
            units["window"] = window[window > 0]
        if self.has_state:
            units["state"] = np.array([holding.state_slot], dtype=np.int64)
        return Extent(request=holding.request, tokens=tokens, page_size=self.page_size, units=units)

    def free(self) -> None:
        for owned in self.sets.values():
            owned.free()
        for table in self.tables.values():
            table.free()

    def _extra(self, holding: Holding, tokens: int, query: int) -> list[tuple[str, int]]:
        wanted = pages_for(tokens, self.page_size)
        extra = [("full", max(0, wanted - len(holding.pages)))]
        if self.has_window:
            extra.append(("window", max(0, wanted - max(self.first_seen_page(query), len(holding.window_pages)))))
        return extra

    def _take(self, space: str, count: int, request: int) -> IndexArray:
        ids = self.allocators[space].allocate(count, request)
        if ids is None:
            raise LayoutMismatch(f"space {space} said it had {count} pages and did not")
        return ids

    def _write_locs(self, holding: Holding, start: int, stop: int) -> None:
        stop = min(stop, self.sizes.max_tokens)
        self.tables["req_to_token"].write(holding.row, start, locs_of(holding.pages, start, stop, self.page_size))
