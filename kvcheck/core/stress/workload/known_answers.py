"""KnownAnswerDecoder: a model with written weights, whose attention and states read the pool in float32.

Every token of a right run is known beforehand. So the decoder finds errors that content words cannot show: right rows
that are scaled, masked, rotated, ranked or counted wrongly. It runs in host memory, on one rank.

Invariants:
- A row counts as verified if an answer depends on it: one row of each buffer and layer for each token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Operation, Signal
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import MetadataField, MetadataRow
from kvcheck.core.stress.workload import handover
from kvcheck.core.stress.workload.events import Forward, Saw, Verified
from kvcheck.core.stress.workload.footprints import SpaceTouch, pass_touches
from kvcheck.core.stress.workload.jobs import Job
from kvcheck.core.stress.workload.known_attention import Asking, known_attention
from kvcheck.core.stress.workload.known_model import DeltaNet, known_model
from kvcheck.core.stress.workload.observation import INDEX_READERS, Readers
from kvcheck.core.stress.workload.passes import ChunkPositions, locs_of_places, piece_of_tokens, places_of


@dataclass(slots=True, kw_only=True)
class _ForwardPass:
    """x: [T, width] residual of all chunks. turned: [T] positions for the rotary embedding. written: flat entries of
    the request table. index: rows of index pages read in the current layer, by piece. states: by buffer, once the layer
    has read its own."""

    chunks: tuple[Chunk, ...]
    x: torch.Tensor
    positions: torch.Tensor
    turned: torch.Tensor
    counts: list[int]
    written: torch.Tensor
    read: Mapping[str, ChunkPositions]
    slots: torch.Tensor
    index: dict[str, torch.Tensor] = field(default_factory=dict)
    states: dict[str, torch.Tensor] = field(default_factory=dict)


class KnownAnswerDecoder:
    def __init__(
        self,
        pool: KVPool,
        backend: Backend,
        jobs: Sequence[Job],
        emit: Emit,
        fields: tuple[MetadataField, ...],
        first_tokens: dict[int, int],
        readers: Readers | None = None,
        host_pages: Callable[[int, int], range] = lambda request, first: range(0),
    ) -> None:
        """first_tokens: by request, the last token sampled by its prefill; shared by both ends of a pair. readers: only
        `replay_every` is used."""
        self._pool, self._backend, self._emit, self._fields = pool, backend, emit, fields
        self._jobs = {job.request: job for job in jobs}
        self._model = known_model(pool.shape)
        self._distances = {job.request: self._model.distances(job) for job in jobs}
        self._first_tokens = first_tokens
        self._columns = pool.tables["req_to_token"].columns
        self._tokens: dict[int, IndexArray] = {}
        self._handed_over: dict[int, Mapping[str, torch.Tensor]] = {}
        self._pass: _ForwardPass | None = None
        self._attention = known_attention(self._model, pool.shape, pool.attention)
        self._delta_net = DeltaNet(self._model, pool.shape) if pool.has_state else None
        self._replay_every = (readers or Readers()).replay_every
        self._passes = 0
        self._host_pages = host_pages
        self._loaded: dict[int, range] = {}
        self._reached: dict[int, int] = {}

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        for chunk in chunks:
            self._emit(Forward(chunk.request_id, chunk.start, chunk.stop))
            if self._reached.get(chunk.request_id) != chunk.start:
                first = chunk.start // self._pool.page_size
                self._loaded[chunk.request_id] = self._host_pages(chunk.request_id, first)
            self._reached[chunk.request_id] = chunk.stop
        self._pass = now = self._begun(tuple(chunks))
        self._passes += 1
        if self._replay_every and self._passes % self._replay_every == 0:
            self._pool.before_replay(self._pool.forward)
            with self._backend.capture(self._pool.forward) as graph:
                self._all_layers(now, is_replayed=True)
            self._backend.replay(graph)
        else:
            self._all_layers(now, is_replayed=False)
        done = self._backend.signal()
        self._backend.record(done, lane=self._pool.forward)
        return done

    def collect(self) -> tuple[int, ...]:
        assert self._pass is not None, "a pass is collected once"
        last = torch.tensor(self._pass.counts).cumsum(0) - 1
        logits = self._model.normed(self._pass.x[last]) @ self._model.tensors["lm_head.weight"].T
        sampled = [int(token) for token in logits.argmax(-1)]
        answered = []
        for chunk, token in zip(self._pass.chunks, sampled, strict=True):
            if chunk.stop >= self._jobs[chunk.request_id].prompt_tokens:
                self._tokens[chunk.request_id][chunk.stop] = token
                answered.append(chunk)
            if chunk.stop == self._jobs[chunk.request_id].prompt_tokens:
                self._first_tokens[chunk.request_id] = token
        if answered:
            self._tell(answered)
        self._pass = None
        return tuple(sampled)

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        if request_id not in self._handed_over:
            self._handed_over[request_id] = handover.metadata_values(
                self._jobs[request_id], self._first_tokens[request_id], self._fields
            )
        return self._handed_over[request_id]

    def join(self, request_id: int, row: MetadataRow) -> None:
        self._handed_over.pop(request_id, None)
        job = self._jobs[request_id]
        expected = handover.expected_row(job, self._first_tokens[request_id], self._fields)
        self._emit(Verified("metadata", expected.numel() // 8))
        for found in handover.mismatches(job, expected, row, self._fields):
            self._emit(Saw(found))
        self._known(request_id)[job.prompt_tokens] = int(row.field("output_ids")[0])

    def _known(self, request: int) -> IndexArray:
        if request not in self._tokens:
            job = self._jobs[request]
            self._tokens[request] = np.zeros(job.total_tokens + 1, dtype=np.int64)
            self._tokens[request][: job.prompt_tokens] = self._model.prompt(job)
        return self._tokens[request]

    def _tell(self, answered: Sequence[Chunk]) -> None:
        for spec in self._pool.specs:
            from_host = sum(self._is_from_host(chunk, spec.name, layer) for chunk in answered for layer in spec.layers)
            for buffer in spec.buffers:
                words = _row_words(buffer, self._pool.page_size)
                self._emit(Verified(buffer.name, len(answered) * len(spec.layers) * words))
                if from_host:
                    self._emit(Verified(f"host:{buffer.name}", from_host * words))

    def _is_from_host(self, chunk: Chunk, space: str, layer: int) -> bool:
        """A loaded state counts as a whole, if it contains the position read."""
        loaded, size = self._loaded[chunk.request_id], self._pool.page_size
        position = chunk.stop - 1 - self._distances[chunk.request_id][layer]
        return bool(loaded) and position < loaded.stop * size if space == "state" else position // size in loaded

    def _begun(self, chunks: tuple[Chunk, ...]) -> _ForwardPass:
        told = self._pool.attention
        written = places_of(chunks, [each.start for each in chunks], [each.stop for each in chunks], self._columns)
        lengths = [told.length(each.start, each.stop) for each in chunks]
        ids = np.concatenate([self._known(each.request_id)[each.start : each.stop] for each in chunks])
        ahead = np.array([told.position(each.holding, each.start) - each.start for each in chunks])
        firsts = {"full": [0] * len(chunks), "window": [told.first_seen(each.start) for each in chunks]}
        return _ForwardPass(
            chunks=chunks,
            x=self._model.tensors["model.embed_tokens.weight"][torch.from_numpy(ids)],
            positions=torch.from_numpy(written.positions),
            turned=torch.from_numpy(written.positions + ahead[written.chunk]),
            counts=[each.stop - each.start for each in chunks],
            written=self._backend.index(written.entries),
            read={space: places_of(chunks, firsts[space], lengths, self._columns) for space in (self._pool.paged)},
            slots=self._backend.index(np.array([each.holding.row for each in chunks], dtype=np.int64)),
        )

    # One layer

    def _all_layers(self, now: _ForwardPass, *, is_replayed: bool) -> None:
        touches = pass_touches(now.chunks, self._pool)
        where = {layer: (spec.name, local) for spec in self._pool.specs for local, layer in enumerate(spec.layers)}
        for layer in sorted(where):
            space, local = where[layer]
            if space == "state":
                self._submit_read(now, touches[space], layer, local, is_replayed)
                self._submit_write(now, touches[space], layer, local)
            else:
                self._submit_write(now, touches[space], layer, local)
                self._submit_read(now, touches[space], layer, local, is_replayed)

    def _submit_write(self, now: _ForwardPass, touch: SpaceTouch, layer: int, local: int) -> None:
        owner = self._pool.sets[touch.space]
        targets = {buffer.name: owner.write_view(buffer.name)[local] for buffer in owner.spec.buffers}
        work = self._write_states if touch.space == "state" else partial(self._write, touch.space, layer)
        self._backend.submit(
            Operation("decode.write", (partial(work, now, targets),)),
            lane=self._pool.forward,
            reads=touch.written_tables,
            writes=touch.writes(owner.spec.buffers, local),
        )

    def _submit_read(self, now: _ForwardPass, touch: SpaceTouch, layer: int, local: int, is_replayed: bool) -> None:
        buffers = self._pool.sets[touch.space].spec.buffers
        waits = () if is_replayed else (local,)
        packed = tuple(buffer for buffer in buffers if buffer.pieces)
        for piece in INDEX_READERS[self._passes % len(INDEX_READERS)] if packed else ():
            name = f"decode.read_index{piece and '_'}{piece}"
            self._submit_reader(name, partial(self._read_index, now), touch, packed, local, waits, piece)
        work = self._read_states if touch.space == "state" else partial(self._read, touch.space)
        others = tuple(buffer for buffer in buffers if not buffer.pieces)
        self._submit_reader("decode.read", partial(work, layer, now), touch, others, local, waits)

    def _submit_reader(
        self,
        name: str,
        work: Callable[[Mapping[str, torch.Tensor]], None],
        touch: SpaceTouch,
        buffers: Sequence[BufferSpec],
        local: int,
        waits: tuple[int, ...],
        piece: str = "",
    ) -> None:
        """waits: layers to wait for; a replayed graph makes none."""
        owner, sources = self._pool.sets[touch.space], dict[str, torch.Tensor]()
        for buffer in buffers:
            view = owner.read_view(buffer.name, waits, self._pool.forward, piece=piece)[local]
            sources |= self._by_piece(buffer, view, piece)
        operation = Operation(name, (partial(work, sources),))
        self._backend.submit(operation, lane=self._pool.forward, reads=touch.reads(buffers, local))

    def _by_piece(self, buffer: BufferSpec, words: torch.Tensor, piece: str = "") -> dict[str, torch.Tensor]:
        """Rows of a buffer in one layer, [R, W]; of a packed one [pages, P, W], of that piece or of all."""
        if not buffer.pieces:
            return {buffer.name: words}
        size = self._pool.page_size
        return {each.name: piece_of_tokens(words, each, size) for each in buffer.pieces if piece in ("", each.name)}

    def _write(self, space: str, layer: int, now: _ForwardPass, targets: Mapping[str, torch.Tensor]) -> None:
        locs, size = locs_of_places(self._pool, space, now.written), self._pool.page_size
        stored = self._attention.stored(layer, self._model.normed(now.x), now.turned)
        for buffer in self._pool.sets[space].spec.buffers:
            for name, rows in self._by_piece(buffer, targets[buffer.name]).items():
                if rows.dim() == 3:
                    rows[locs // size, locs % size] = stored[name]
                else:
                    rows.index_copy_(0, locs, stored[name])

    def _read_index(self, now: _ForwardPass, sources: Mapping[str, torch.Tensor]) -> None:
        now.index |= self._rows("full", now, sources)

    def _rows(self, space: str, now: _ForwardPass, sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The rows read by all chunks, concatenated, [n, W]."""
        size = self._pool.page_size
        locs = locs_of_places(self._pool, space, self._backend.index(now.read[space].entries))
        return {
            name: words[locs // size, locs % size] if words.dim() == 3 else words.index_select(0, locs)
            for name, words in sources.items()
        }

    def _read(self, space: str, layer: int, now: _ForwardPass, sources: Mapping[str, torch.Tensor]) -> None:
        places = now.read[space]
        lengths = np.bincount(places.chunk, minlength=len(now.chunks)).tolist()
        rows = now.index | self._rows(space, now, sources)
        by_name = {name: torch.split(each, lengths) for name, each in rows.items()}
        by_chunk = zip(
            now.chunks,
            torch.split(self._model.normed(now.x), now.counts),
            torch.split(now.turned, now.counts),
            torch.split(now.positions, now.counts),
            torch.split(torch.from_numpy(places.positions), lengths),
            strict=True,
        )
        added = []
        for at, (chunk, x, turned, asked, seen) in enumerate(by_chunk):
            back = self._distances[chunk.request_id][layer]
            asking = Asking(x, turned - back, self._hidden(space, asked, seen))
            added.append(self._attention.added(layer, asking, {name: each[at] for name, each in by_name.items()}))
        now.x = now.x + torch.cat(added)

    def _hidden(self, space: str, asked: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        hidden = seen > asked[:, None]
        if space == "window":
            firsts = torch.tensor([self._pool.attention.first_seen(position) for position in asked.tolist()])
            hidden |= seen < firsts[:, None]
        return hidden

    def _read_states(self, layer: int, now: _ForwardPass, sources: Mapping[str, torch.Tensor]) -> None:
        assert self._delta_net is not None, "a pool with states"
        slots = self._state_slots(now)
        before = {name: words.index_select(0, slots) for name, words in sources.items()}
        by_chunk = torch.split(self._model.normed(now.x), now.counts)
        added, after = [], []
        for at, (chunk, x) in enumerate(zip(now.chunks, by_chunk, strict=True)):
            mine = {name: words[at] for name, words in before.items()}
            times = self._pool.attention.times(chunk.holding)
            more, left = self._delta_net.added(layer, x, mine, times=times)
            added.append(more)
            after.append(left)
        now.x = now.x + torch.cat(added)
        now.states = {name: torch.stack([each[name] for each in after]) for name in before}

    def _write_states(self, now: _ForwardPass, targets: Mapping[str, torch.Tensor]) -> None:
        slots = self._state_slots(now)
        for name, words in targets.items():
            words.index_copy_(0, slots, now.states[name])

    def _state_slots(self, now: _ForwardPass) -> torch.Tensor:
        return self._pool.tables["req_to_state"].read_view().view(-1).index_select(0, now.slots)


def _row_words(buffer: BufferSpec, page_size: int) -> int:
    words = buffer.row_bytes // 8
    return words // page_size if buffer.rows is Granularity.PAGE else words
