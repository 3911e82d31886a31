"""ContentDecoder: a model whose KV is content words and whose attention checks every word it reads.

Invariants:
- A token is the code of its position if all words read are as expected; otherwise the deviating words change it.
- Kernels resolve rows through the pool's tables when they run. No comparison blocks the process inside a pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch

from kvcheck.core.base import content
from kvcheck.core.base.paging import IndexArray, pages_for
from kvcheck.core.cache.backend.backend import Backend, Lane, Operation, Signal
from kvcheck.core.cache.events import Emit
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import MetadataField, MetadataRow
from kvcheck.core.stress.workload import handover
from kvcheck.core.stress.workload.events import Forward, Saw, Verified
from kvcheck.core.stress.workload.footprints import SpaceTouch, pass_touches
from kvcheck.core.stress.workload.jobs import Job, token_authors
from kvcheck.core.stress.workload.mismatch import Mismatch
from kvcheck.core.stress.workload.observation import INDEX_READERS, Observation, Readers
from kvcheck.core.stress.workload.passes import PassPlan, locs_of_places, piece_of_tokens, plan_pass
from kvcheck.kernels.content import as_signed, mix64_int, rows_torch
from kvcheck.kernels.content_rows import differing

MAX_ROWS_REPORTED = 4
"""Deviating rows of one read that are described word by word; the rest are counted."""


class ContentDecoder:
    def __init__(
        self,
        pool: KVPool,
        backend: Backend,
        jobs: Sequence[Job],
        emit: Emit,
        fields: tuple[MetadataField, ...],
        readers: Readers | None = None,
        first_words: Mapping[tuple[str, str], int] | None = None,
    ):
        self._pool = pool
        self._backend = backend
        self._jobs = {job.request: job for job in jobs}
        self._emit = emit
        self._fields = fields
        self._codes: dict[int, torch.Tensor] = {}
        self._authors: dict[int, IndexArray] = {}
        self._folds: dict[int, IndexArray] = {}
        self._masks: dict[tuple[content.Site, int], torch.Tensor] = {}
        self._first: dict[int, int] = {}
        self._chunks: tuple[Chunk, ...] = ()
        self._observed: list[Observation] = []
        self._readers = readers or Readers()
        self._first_words = first_words or {}
        self._begun: set[int] = set()
        self._handed_over: dict[int, Mapping[str, torch.Tensor]] = {}
        self._passes = 0
        self._is_replayed = False
        self._touches: Mapping[str, SpaceTouch] = {}

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        for chunk in chunks:
            self._learn(chunk.request_id)
            self._emit(Forward(chunk.request_id, chunk.start, chunk.stop))
        plan = plan_pass(chunks, self._codes, self._pool, self._backend)
        self._chunks, self._observed = plan.chunks, []
        self._passes += 1
        self._touches = pass_touches(plan.chunks, self._pool)
        self._is_replayed = bool(self._readers.replay_every) and self._passes % self._readers.replay_every == 0
        if self._is_replayed:
            self._pool.before_replay(self._pool.forward)
        sent = self._send_early()
        if self._is_replayed:
            with self._backend.capture(self._pool.forward) as graph:
                self._all_layers(plan)
            self._backend.replay(graph)
        else:
            self._all_layers(plan)
        if sent is not None:
            self._backend.wait(sent, lane=self._pool.forward)
        done = self._backend.signal()
        self._backend.record(done, lane=self._pool.forward)
        return done

    def _send_early(self) -> Signal | None:
        first = [n for n, chunk in enumerate(self._chunks) if chunk.request_id not in self._begun]
        self._begun.update(chunk.request_id for chunk in self._chunks)
        numbers = [n for n in first if self._chunks[n].start > 0]
        if not numbers or not self._readers.early_send:
            return None
        lane = self._backend.lane("send")
        computed = self._backend.signal()
        self._backend.record(computed, lane=self._pool.forward)
        self._backend.wait(computed, lane=lane)
        prefixes = [
            Chunk(chunk.request_id, chunk.holding, chunk.start - 1, chunk.start)
            for chunk in (self._chunks[n] for n in numbers)
        ]
        plan = plan_pass(prefixes, self._codes, self._pool, self._backend, numbers=numbers)
        touch = pass_touches(prefixes, self._pool)["full"]
        for local, layer in enumerate(self._pool.sets["full"].spec.layers):
            buffers = self._pool.sets["full"].spec.buffers
            self._submit("decode.send_early", plan, "full", buffers, local, layer, lane=lane, touch=touch)
        sent = self._backend.signal()
        self._backend.record(sent, lane=lane)
        return sent

    def collect(self) -> tuple[int, ...]:
        deltas = [0] * len(self._chunks)
        for seen in self._observed:
            self._emit(Verified(seen.site.buffer, seen.judged * seen.rows.shape[-1]))
            if seen.bad.cpu().numpy().any():  # much cheaper on a CPU than torch's own test
                self._report(seen, deltas)
        tokens = []
        for chunk, delta in zip(self._chunks, deltas, strict=True):
            token = self._token(chunk.request_id, chunk.stop, delta)
            if chunk.stop == self._jobs[chunk.request_id].prompt_tokens:
                self._first[chunk.request_id] = token
            tokens.append(token)
        self._observed = []
        return tuple(tokens)

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        if request_id not in self._handed_over:
            self._handed_over[request_id] = handover.metadata_values(
                self._jobs[request_id], self._first[request_id], self._fields
            )
        return self._handed_over[request_id]

    def join(self, request_id: int, row: MetadataRow) -> None:
        self._handed_over.pop(request_id, None)
        self._emit(Verified("metadata", self.expected_row(request_id).numel() // 8))
        for found in self.metadata_mismatches(request_id, row):
            self._emit(Saw(found))

    def _token(self, request: int, stop: int, delta: int) -> int:
        return mix64_int((int(self._folds[request][stop - 1]) + delta) & ((1 << 64) - 1)) >> 33

    def codes_of(self, request: int) -> torch.Tensor:
        """Codes of every position of a request, padded to whole pages, in host memory."""
        self._learn(request)
        return self._codes[request]

    def author_of(self, request: int, position: int) -> int:
        self._learn(request)
        return int(self._authors[request][position])

    def expected_row(self, request: int) -> torch.Tensor:
        """The packed row of a request's prefill, [row_bytes] uint8."""
        job = self._jobs[request]
        self._learn(request)  # a decode end has not computed the prompt, so it takes the expected first token
        first = self._first.get(request, self._token(request, job.prompt_tokens, 0))
        return handover.expected_row(job, first, self._fields)

    def metadata_mismatches(self, request: int, row: MetadataRow) -> list[Mismatch]:
        return list(handover.mismatches(self._jobs[request], self.expected_row(request), row, self._fields))

    # One layer

    def _all_layers(self, plan: PassPlan) -> None:
        where = {layer: (spec.name, local) for spec in self._pool.specs for local, layer in enumerate(spec.layers)}
        for layer in sorted(where):
            space, local = where[layer]
            if local and self._readers.one_layer:
                continue
            self._layer(plan, space, local, layer)

    def _layer(self, plan: PassPlan, space: str, local: int, layer: int) -> None:
        buffers = self._pool.sets[space].spec.buffers
        writes = tuple(self._write_part(plan, space, buffer, local, layer) for buffer in buffers)
        if space == "state":
            self._submit("decode.read_state", plan, space, buffers, local, layer)
        self._backend.submit(
            Operation("decode.write", writes),
            lane=self._pool.forward,
            reads=self._touches[space].written_tables,
            writes=self._touches[space].writes(buffers, local),
        )
        if space == "state":
            return
        packed = tuple(buffer for buffer in buffers if buffer.pieces)
        for piece in INDEX_READERS[self._passes % len(INDEX_READERS)] if packed else ():
            name = f"decode.read_index{piece and '_'}{piece}"
            self._submit(name, plan, space, packed, local, layer, piece=piece)
        if len(packed) < len(buffers):
            rows = tuple(buffer for buffer in buffers if not buffer.pieces)
            self._submit("decode.read", plan, space, rows, local, layer)

    def _submit(
        self,
        name: str,
        plan: PassPlan,
        space: str,
        buffers: tuple[BufferSpec, ...],
        local: int,
        layer: int,
        *,
        piece: str = "",
        lane: Lane | None = None,
        touch: SpaceTouch | None = None,
    ) -> None:
        owner, on = self._pool.sets[space], lane or self._pool.forward
        # A replayed graph makes no waits of its own: it relies on the wait before it.
        layers = () if self._is_replayed and lane is None else (local,)
        views = [owner.read_view(buffer.name, layers, on, piece=piece) for buffer in buffers]
        work = tuple(
            partial(self._read, plan, space, buffer, view, local, layer, piece)
            for buffer, view in zip(buffers, views, strict=True)
        )
        reads = (touch or self._touches[space]).reads(buffers, local)
        self._backend.submit(Operation(name, work), lane=on, reads=reads)

    def _write_part(self, plan: PassPlan, space: str, buffer: BufferSpec, local: int, layer: int) -> partial[None]:
        words = self._pool.sets[space].write_view(buffer.name)
        return partial(self._write, plan, space, buffer, words[local], layer)

    def _write(self, plan: PassPlan, space: str, buffer: BufferSpec, words: torch.Tensor, layer: int) -> None:
        if space == "state":
            slots = self._state_slots(plan)
            words.index_copy_(0, slots, self._rule(plan.state_write, space, buffer, layer, words.shape[-1]))
            return
        locs = locs_of_places(self._pool, space, plan.write.places)
        if buffer.rows is Granularity.TOKEN:
            words.index_copy_(0, locs, self._rule(plan.write.codes, space, buffer, layer, words.shape[-1]))
            return
        for piece in buffer.pieces:
            view = piece_of_tokens(words, piece, self._pool.page_size)
            site = self.site(space, buffer, layer, piece.name)
            rows = rows_torch(plan.write.codes, self._mask(site, view.shape[-1]), view.dtype)
            view[locs // self._pool.page_size, locs % self._pool.page_size] = rows

    def _read(
        self, plan: PassPlan, space: str, buffer: BufferSpec, words: torch.Tensor, local: int, layer: int, piece: str
    ) -> None:
        size = self._pool.page_size
        if space == "state":
            slots = self._state_slots(plan)
            site = self.site(space, buffer, layer)
            rows = words[local].index_select(0, slots)
            bad = differing(rows, plan.state_read, self._mask(site, rows.shape[-1]))
            if any(chunk.start == 0 for chunk in plan.chunks):  # a slot is empty when a request first reads it
                bad = torch.where(plan.fresh, (rows != 0).any(-1), bad)
            positions = np.array([chunk.start - 1 for chunk in plan.chunks])
            self._observe(plan, site, bad, rows, slots, False, np.arange(len(plan.chunks)), positions)
        elif buffer.rows is Granularity.TOKEN:
            wanted = plan.window if space == "window" and plan.window is not None else plan.read
            locs = locs_of_places(self._pool, space, wanted.places)
            site = self.site(space, buffer, layer)
            rows = words[local].index_select(0, locs)
            bad = differing(rows, wanted.codes, self._mask(site, rows.shape[-1]))
            self._observe(plan, site, bad, rows, locs, True, wanted.chunk, wanted.positions)
        else:
            table = self._pool.tables["req_to_token"].read_view().view(-1)
            pages = table.index_select(0, plan.page_places) // size
            starts = plan.page_number * size
            for each in (each for each in buffer.pieces if piece in ("", each.name)):
                site = self.site(space, buffer, layer, each.name)
                view = piece_of_tokens(words[local], each, size).index_select(0, pages)
                bad = differing(view, plan.page_codes, self._mask(site, view.shape[-1])) & plan.page_valid
                self._observe(plan, site, bad, view, pages, False, plan.page_chunk, starts, tokens=size)

    def _observe(
        self,
        plan: PassPlan,
        site: content.Site,
        bad: torch.Tensor,
        rows: torch.Tensor,
        ids: torch.Tensor,
        are_locs: bool,
        chunk: IndexArray,
        positions: IndexArray,
        tokens: int = 1,
    ) -> None:
        self._observed.append(
            Observation(
                site=site,
                bad=bad,
                rows=rows,
                ids=ids,
                are_locs=are_locs,
                chunk=chunk if plan.chunks is self._chunks else plan.numbers[chunk],
                positions=positions,
                tokens=tokens,
                judged=len(positions) if tokens == 1 else plan.tokens,  # not the unused tail of a last page
            )
        )

    # Expected content

    def _state_slots(self, plan: PassPlan) -> torch.Tensor:
        return self._pool.tables["req_to_state"].read_view().view(-1).index_select(0, plan.rows)

    def _rule(self, codes: torch.Tensor, space: str, buffer: BufferSpec, layer: int, words: int) -> torch.Tensor:
        return rows_torch(codes, self._mask(self.site(space, buffer, layer), words), torch.int64)

    def site(self, space: str, buffer: BufferSpec, layer: int, piece: str = "") -> content.Site:
        return content.Site(space, buffer.name, piece, layer, self._first_words.get((space, buffer.name), 0))

    def _mask(self, site: content.Site, words: int) -> torch.Tensor:
        key = (site, words)
        if key not in self._masks:
            # By the backend: inside an operation an ordinary upload would make the host wait for the lane.
            self._masks[key] = self._backend.index(content.mask(site, words).numpy())
        return self._masks[key]

    def _learn(self, request: int) -> None:
        if request in self._codes:
            return
        job = self._jobs[request]
        authors = token_authors(job)
        padding = pages_for(len(authors) + 1, self._pool.page_size) * self._pool.page_size - len(authors)
        authors = np.concatenate((authors, np.full(padding, request, dtype=np.int64)))
        codes = content.codes(authors, np.arange(len(authors), dtype=np.int64))
        weights = torch.arange(len(authors), dtype=torch.int64) * 2 + 1
        self._folds[request] = (codes * weights).cumsum(0).numpy()
        self._authors[request] = authors
        self._codes[request] = codes

    # Observations

    def _report(self, seen: Observation, deltas: list[int]) -> None:
        bad = torch.nonzero(seen.bad.reshape(-1)).view(-1).cpu().numpy()
        words = seen.rows[seen.bad].cpu().numpy()
        at_unit, in_unit = bad // seen.tokens, bad % seen.tokens
        chunks = seen.chunk[at_unit]
        counts = np.bincount(chunks, minlength=len(self._chunks))
        reported = [0] * len(self._chunks)
        for which, unit, token, row in zip(chunks, at_unit, in_unit, words, strict=True):
            deltas[which] += mix64_int(int(row[0]) & ((1 << 64) - 1)) | 1
            reported[which] += 1
            if reported[which] > MAX_ROWS_REPORTED:
                continue
            request, position = self._chunks[which].request_id, int(seen.positions[unit] + token)
            page, offset = int(seen.ids[unit]), int(token)
            if seen.are_locs:
                page, offset = divmod(page, self._pool.page_size)
            found = Mismatch(
                request=request,
                space=seen.site.space,
                buffer=seen.site.buffer,
                piece=seen.site.piece,
                layer=seen.site.layer,
                page=page,
                row=offset,
                position=position,
                author=int(self._authors[request][position]),
                words=tuple(int(value) for value in row[:64]),
                half=seen.rows.dtype == torch.int32,
                count=int(counts[which]),
                first_word=seen.site.first_word,
            )
            self._emit(Saw(found))


def prompt_tokens(job: Job) -> IndexArray:
    """Token ids of a prompt: equal exactly if author and position are equal. [prompt_tokens] int64."""
    authors = token_authors(job)[: job.prompt_tokens]
    return content.codes(authors, np.arange(job.prompt_tokens, dtype=np.int64)).numpy() & as_signed((1 << 31) - 1)
