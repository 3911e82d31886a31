"""The work of one decode step: every layer gathers the rows of a few requests, attends to them and writes a token.

    requests  [ctx 0 ... 63 | new]  x 4      per layer: rows -> float32 -> scores -> softmax -> mix -> out[layer]

Every layer computes on the forward lane. Values are normal numbers of the model's type, so no product is a NaN or a
denormal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray, locs_of
from kvcheck.core.bench.arms import same
from kvcheck.core.bench.memory import BenchBackend, FreshMemory
from kvcheck.core.cache.backend.backend import ChunkWork, Lane, Operation
from kvcheck.core.cache.hicache.layer_gate import LayerGate
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool, PoolSizes
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import MetadataBuffers

REQUESTS = 4
CONTEXT = 64
HEADS = 8
SLOTS = 16
REQUEST = 1


@dataclass(frozen=True, slots=True)
class _Layer:
    number: int
    space: str
    local: int
    keys: str
    values: str
    words: torch.Tensor
    value_words: torch.Tensor


class DecodeStep:
    def __init__(self, memory: FreshMemory, shape: ModelShape, backend: BenchBackend) -> None:
        self._backend = backend
        self._launch: Callable[..., None] = backend.launch
        pages = REQUESTS * (-(-(CONTEXT + 1) // shape.page_size))
        self.pool = KVPool(
            shape,
            PoolSizes(pages=pages, requests=REQUESTS, max_tokens=CONTEXT + 1, window_pages=pages),
            backend=backend,
        )
        self.gate = LayerGate(backend, lanes=2, layers=shape.num_layers)
        self.pool.connect(self.gate)
        self.metadata = MetadataBuffers(
            "decode", slots=SLOTS, hidden_size=shape.hidden_size, backend=backend, lane=self.pool.forward
        )
        self._views = [memory.empty((SLOTS, field.width), field.dtype) for field in self.metadata.fields]
        slot = self.metadata.lease(1)
        assert slot is not None, "no slot is taken"
        self._slot = slot
        self._holdings = []
        for request in range(1, REQUESTS + 1):
            holding = self.pool.open(request)
            assert holding is not None and self.pool.grow(holding, CONTEXT + 1, query=0), "the pool holds them all"
            self.pool.commit(holding, CONTEXT)
            self._holdings.append(holding)
        self._layers = self._attending(memory)
        self._context = {name: self._locs(name, 0, CONTEXT) for name in self.pool.paged}
        self._new = {name: self._locs(name, CONTEXT, CONTEXT + 1) for name in self.pool.paged}
        widths = {each.words.shape[2] for each in self._layers}
        random = torch.Generator().manual_seed(int(memory.random.integers(1 << 31)))
        made = {wide: torch.randn((REQUESTS, HEADS, wide * 4), generator=random) for wide in widths}
        self._queries = {wide: query.to(memory.device) for wide, query in made.items()}
        self._rows = {wide: self._numbers(memory, (REQUESTS, wide)) for wide in {*widths, *self._value_widths()}}
        self.out: dict[int, torch.Tensor] = {}
        self.views: list[tuple[torch.Tensor, torch.Tensor]] = []
        backend.drain()

    def bare(self) -> None:
        self._read_metadata_views()
        launch, lane = self._launch, self.pool.forward
        for each in self._layers:
            launch(lane, self._layer, each, each.words[each.local], each.value_words[each.local])

    def guarded(self) -> None:
        self._read_metadata_views()
        self._guarded_layers()

    def numbers(self) -> torch.Tensor:
        self._backend.drain()
        return torch.stack([self.out[each.number] for each in self._layers])

    def guards(self) -> None:
        lane = self.pool.forward
        self.views = [
            (owner.read_view(each.keys, (each.local,), lane), owner.read_view(each.values, (each.local,), lane))
            for each in self._layers
            if (owner := self.pool.sets[each.space])
        ]

    def check_guards(self) -> None:
        for number, (got, each) in enumerate(zip(self.views, self._layers, strict=True)):
            same(f"keys of layer {number}", got[0], each.words)
            same(f"values of layer {number}", got[1], each.value_words)

    def protected(self) -> None:
        self._grow()
        self._joined = self.metadata.get(self._slot, 1)
        self._guarded_layers()

    def graphed(self, work: Callable[[], None], *, is_guarded: bool) -> Callable[[], None]:
        """Return a replay of work() as a graph of the forward lane, captured here. is_guarded: each replay first waits
        for the whole load."""
        lane = self.pool.forward
        work()  # kernels and the libraries of products are loaded before a capture
        self._backend.drain()
        launched: list[ChunkWork] = []

        def keep(lane: Lane, work: Callable[..., None], *args: object) -> None:
            launched.append(partial(work, *args))

        def run() -> None:
            for each in launched:
                each()

        with self._backend.capture(lane) as graph:
            self._launch = keep
            work()
            self._launch = self._backend.launch
            self._backend.submit(Operation("bench.step", (run,)), lane=lane)

        def call() -> None:
            if is_guarded:
                self.pool.before_replay(lane)
            self._backend.replay(graph)

        call()
        self._backend.drain()
        return call

    def context_pages(self, space: str) -> IndexArray:
        size = self.pool.page_size
        return np.concatenate([self._pages(space, at)[: CONTEXT // size] for at in range(REQUESTS)])

    def context_rows(self, space: str, buffer: BufferSpec) -> torch.Tensor:
        pages, size = self.context_pages(space), self.pool.page_size
        is_token = buffer.rows is Granularity.TOKEN
        return self._backend.index(locs_of(pages, 0, len(pages) * size, size) if is_token else pages)

    def load(self, layer: int) -> ChunkWork:
        """Wipe a global layer's keys and values, and return work that restores them."""
        own = [each for each in self._layers if self.pool.sets[each.space].spec.layers[each.local] == layer]
        words = [words[each.local] for each in own for words in (each.words, each.value_words)]
        kept = [each.clone() for each in words]
        for each in words:
            each.zero_()
        self._backend.drain()

        def run() -> None:
            for target, source in zip(words, kept, strict=True):
                target.copy_(source)

        return run

    def _guarded_layers(self) -> None:
        launch, lane = self._launch, self.pool.forward
        for each in self._layers:
            launch(lane, self._layer, each, *self._guarded(each))

    def _guarded(self, each: _Layer) -> tuple[torch.Tensor, torch.Tensor]:
        owner, lane = self.pool.sets[each.space], self.pool.forward
        keys = owner.read_view(each.keys, (each.local,), lane)[each.local]
        return keys, owner.read_view(each.values, (each.local,), lane)[each.local]

    def _grow(self) -> None:
        for holding in self._holdings:
            if not self.pool.grow(holding, holding.committed + 1, query=holding.committed):
                raise AssertionError("the pool holds them all")

    def _read_metadata_views(self) -> None:
        self._views_read = [view[self._slot] for view in self._views]

    def _layer(self, each: _Layer, keys: torch.Tensor, values: torch.Tensor) -> None:
        context, new = self._context[each.space], self._new[each.space]
        key, value = self._float(keys.index_select(0, context)), self._float(values.index_select(0, context))
        weights = torch.softmax(torch.bmm(self._queries[keys.shape[1]], key.transpose(1, 2)), dim=-1)
        keys.index_copy_(0, new, self._rows[keys.shape[1]])
        if each.values != each.keys:
            values.index_copy_(0, new, self._rows[values.shape[1]])
        self.out[each.number] = torch.bmm(weights, value)

    @staticmethod
    def _float(rows: torch.Tensor) -> torch.Tensor:
        """[B * T, W] words as [B, T, 4 W] numbers."""
        return rows.view(torch.bfloat16).to(torch.float32).view(REQUESTS, CONTEXT, -1)

    def _attending(self, memory: FreshMemory) -> list[_Layer]:
        layers: list[_Layer] = []
        for spec in self.pool.specs:
            tokens = [buffer for buffer in spec.buffers if buffer.rows is Granularity.TOKEN]
            if spec.name not in self.pool.paged or not tokens:
                continue
            words = {buffer.name: self.pool.sets[spec.name].write_view(buffer.name) for buffer in tokens}
            for each in words.values():
                each.copy_(self._numbers(memory, (1, *each.shape[1:])).expand_as(each))
            # The second buffer holds values also if rows have scales.
            names = [tokens[0].name, tokens[1].name if len(tokens) > 1 and spec.name != "state" else tokens[0].name]
            if words[names[0]].shape[2] != words[names[1]].shape[2]:
                names[1] = names[0]
            layers += [
                _Layer(len(layers) + local, spec.name, local, names[0], names[1], words[names[0]], words[names[1]])
                for local in range(len(spec.layers))
            ]
        return layers

    def _value_widths(self) -> set[int]:
        return {each.value_words.shape[2] for each in self._layers}

    @staticmethod
    def _numbers(memory: FreshMemory, shape: tuple[int, ...]) -> torch.Tensor:
        random = torch.Generator().manual_seed(int(memory.random.integers(1 << 31)))
        numbers = torch.randn((*shape[:-1], shape[-1] * 4), generator=random).to(torch.bfloat16)
        return numbers.view(torch.int64).to(memory.device)

    def _locs(self, space: str, start: int, stop: int) -> torch.Tensor:
        rows = [locs_of(self._pages(space, at), start, stop, self.pool.page_size) for at in range(REQUESTS)]
        return self._backend.index(np.concatenate(rows))

    def _pages(self, space: str, at: int) -> IndexArray:
        holding = self._holdings[at]
        return holding.window_pages if space == "window" else holding.pages


class TwoHoldings:
    def __init__(self, memory: FreshMemory, shape: ModelShape, tokens: int) -> None:
        pages = -(-tokens // shape.page_size)
        self.tokens = tokens
        self.backend = memory.backend()
        self.pool = KVPool(
            shape,
            PoolSizes(pages=2 * pages, requests=2, max_tokens=tokens, window_pages=2 * pages, state_slots=2),
            backend=self.backend,
        )
        for space in self.pool.paged:  # freed pages are allocated first: after this, in a random order
            allocator = self.pool.allocators[space]
            ids = allocator.allocate(2 * pages, REQUEST)
            assert ids is not None, "the pool is empty"
            allocator.free(memory.random.permutation(ids))
        self.source, self.target = self._opened(), self._opened()

    @staticmethod
    def bytes_of(shape: ModelShape, tokens: int) -> int:
        rows = {Granularity.TOKEN: tokens, Granularity.PAGE: -(-tokens // shape.page_size), Granularity.SLOT: 1}
        return sum(
            len(spec.layers) * buffer.row_bytes * rows[buffer.rows]
            for spec in POOLS.load(shape.family)(shape)
            for buffer in spec.buffers
        )

    def rows(self, holding: Holding, space: str, buffer: BufferSpec) -> torch.Tensor:
        return self.backend.index(self.pool.extent(holding, self.tokens).rows(space, buffer))

    def whole_rows(self, holding: Holding, space: str, buffer: BufferSpec) -> torch.Tensor:
        """Rows of all its pages, to the end of the last."""
        units = self.pool.extent(holding, self.tokens).units[space]
        if buffer.rows is not Granularity.TOKEN:
            return self.backend.index(units)
        size = self.pool.page_size
        return self.backend.index(locs_of(units, 0, len(units) * size, size))

    def buffers(self) -> Iterator[tuple[str, BufferSpec, torch.Tensor]]:
        for space, buffer in self.pool.buffers():
            yield space, buffer, self.pool.sets[space].write_view(buffer.name)

    def check(self, *, but: str = "") -> None:
        """Raise WrongOutput unless the target holds the bytes of the source in every buffer except `but`."""
        for space, buffer, words in self.buffers():
            if buffer.name != but:
                mine, theirs = (words[:, self.rows(each, space, buffer)] for each in (self.target, self.source))
                same(f"{space}.{buffer.name}", mine, theirs)

    def _opened(self) -> Holding:
        holding = self.pool.open(REQUEST)
        assert holding is not None and self.pool.grow(holding, self.tokens, query=0), "the pool holds it twice"
        self.pool.commit(holding, self.tokens)
        return holding
