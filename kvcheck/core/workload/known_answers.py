"""KnownAnswerDecoder: a model with written weights, whose attention reads the paged pool in float32.

It samples what its attention makes of the rows, and every token that a right run samples is known beforehand. So it
shows what words cannot: right rows that are scaled, masked, turned or counted wrongly.

Invariants:
- A token is a function of the rows that the attention read, through the pool's tables, when its kernel ran.
- It compares no row. What is wrong shows in the tokens, and in the metadata that come with a prompt.
- A row counts as verified where an answer depends on it: one row of each buffer and layer for each token.
- It runs in host memory, on one rank, and reads nothing beside its passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, Operation, Signal
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.scheduler.decoder import Chunk
from kvcheck.core.cache.transfer.metadata import MetadataField, MetadataRow
from kvcheck.core.workload import handover
from kvcheck.core.workload.events import Emit, Forward, Saw, Verified
from kvcheck.core.workload.footprints import pass_touches
from kvcheck.core.workload.jobs import Job
from kvcheck.core.workload.known_attention import known_attention
from kvcheck.core.workload.known_model import known_model
from kvcheck.core.workload.passes import Places, locs_of_places, places_of


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One pass. x: [T, width] residual of the tokens of all chunks, one chunk after another; the reads of each layer
    add to it. positions: [T] of their rows; turned: [T] by which they are turned. counts: tokens of each chunk.

    written: entries of the request table where they lie, on the device; read: by space, what each chunk reads.
    """

    chunks: tuple[Chunk, ...]
    x: torch.Tensor
    positions: torch.Tensor
    turned: torch.Tensor
    counts: list[int]
    written: torch.Tensor
    read: Mapping[str, Places]


class KnownAnswerDecoder:
    """The scheduler's Decoder over a known-answer model."""

    def __init__(
        self,
        pool: KVPool,
        backend: Backend,
        jobs: Sequence[Job],
        emit: Emit,
        fields: tuple[MetadataField, ...],
        first_tokens: dict[int, int],
    ) -> None:
        """first_tokens: by request, what its prefill has sampled last; shared by both ends of a pair."""
        self._pool, self._backend, self._emit, self._fields = pool, backend, emit, fields
        self._jobs = {job.request: job for job in jobs}
        self._model = known_model(pool.shape)
        self._first_tokens = first_tokens
        self._columns = pool.tables["req_to_token"].columns
        self._tokens: dict[int, IndexArray] = {}
        self._handed_over: dict[int, Mapping[str, torch.Tensor]] = {}
        self._pass: _Pass | None = None
        self._attention = known_attention(self._model, pool.shape, pool.attention)

    def forward(self, chunks: Sequence[Chunk]) -> Signal:
        """Queue writes and attention of every layer."""
        for chunk in chunks:
            self._emit(Forward(chunk.request_id, chunk.start, chunk.stop))
        self._pass = now = self._begun(tuple(chunks))
        touches = pass_touches(chunks, self._pool)
        where = {layer: (spec.name, local) for spec in self._pool.specs for local, layer in enumerate(spec.layers)}
        for layer in sorted(where):
            space, local = where[layer]
            owner, touch = self._pool.sets[space], touches[space]
            buffers = owner.spec.buffers
            writes = {buffer.name: owner.write_view(buffer.name)[local] for buffer in buffers}
            self._backend.submit(
                Operation("decode.write", (partial(self._write, now, space, layer, writes),)),
                lane=self._pool.forward,
                reads=touch.written_tables,
                writes=touch.writes(buffers, local),
            )
            reads = {
                buffer.name: owner.read_view(buffer.name, (local,), self._pool.forward)[local] for buffer in buffers
            }
            self._backend.submit(
                Operation("decode.read", (partial(self._read, now, space, layer, reads),)),
                lane=self._pool.forward,
                reads=touch.reads(buffers, local),
            )
        done = self._backend.signal()
        self._backend.record(done, lane=self._pool.forward)
        return done

    def collect(self) -> tuple[int, ...]:
        """The tokens that the pass samples."""
        assert self._pass is not None, "a pass is collected once"
        last = torch.tensor(self._pass.counts).cumsum(0) - 1
        logits = self._model.normed(self._pass.x[last]) @ self._model.tensors["lm_head.weight"].T
        sampled = [int(token) for token in logits.argmax(-1)]
        answered = 0
        for chunk, token in zip(self._pass.chunks, sampled, strict=True):
            if chunk.stop >= self._jobs[chunk.request_id].prompt_tokens:
                self._tokens[chunk.request_id][chunk.stop] = token
                answered += 1
            if chunk.stop == self._jobs[chunk.request_id].prompt_tokens:
                self._first_tokens[chunk.request_id] = token
        for spec in self._pool.specs if answered else ():
            for buffer in spec.buffers:
                self._emit(Verified(buffer.name, answered * len(spec.layers) * (buffer.row_bytes // 8)))
        self._pass = None
        return tuple(sampled)

    def metadata(self, request_id: int) -> Mapping[str, torch.Tensor]:
        """The fields this request uses."""
        if request_id not in self._handed_over:
            self._handed_over[request_id] = handover.metadata_values(
                self._jobs[request_id], self._first_tokens[request_id], self._fields
            )
        return self._handed_over[request_id]

    def join(self, request_id: int, row: MetadataRow) -> None:
        """Compare the packed row with what the prompt's prefill hands over, and go on from the token in it."""
        self._handed_over.pop(request_id, None)
        job = self._jobs[request_id]
        expected = handover.expected_row(job, self._first_tokens[request_id], self._fields)
        self._emit(Verified("metadata", expected.numel() // 8))
        for found in handover.mismatches(job, expected, row, self._fields):
            self._emit(Saw(found))
        self._known(request_id)[job.prompt_tokens] = int(row.field("output_ids")[0])

    def _known(self, request: int) -> IndexArray:
        """Tokens of a request as far as they are known here: its prompt, then what was sampled. 0 elsewhere."""
        if request not in self._tokens:
            job = self._jobs[request]
            self._tokens[request] = np.zeros(job.total_tokens + 1, dtype=np.int64)
            self._tokens[request][: job.prompt_tokens] = self._model.prompt(job)
        return self._tokens[request]

    def _begun(self, chunks: tuple[Chunk, ...]) -> _Pass:
        told = self._pool.attention
        written = places_of(chunks, [each.start for each in chunks], [each.stop for each in chunks], self._columns)
        lengths = [told.length(each.start, each.stop) for each in chunks]
        ids = np.concatenate([self._known(each.request_id)[each.start : each.stop] for each in chunks])
        ahead = np.array([told.position(each.holding, each.start) - each.start for each in chunks])
        firsts = {"full": [0] * len(chunks), "window": [told.first_seen(each.start) for each in chunks]}
        return _Pass(
            chunks=chunks,
            x=self._model.tensors["model.embed_tokens.weight"][torch.from_numpy(ids)],
            positions=torch.from_numpy(written.positions),
            turned=torch.from_numpy(written.positions + ahead[written.chunk]),
            counts=[each.stop - each.start for each in chunks],
            written=self._backend.index(written.entries),
            read={space: places_of(chunks, firsts[space], lengths, self._columns) for space in (self._pool.paged)},
        )

    # One layer

    def _write(self, now: _Pass, space: str, layer: int, targets: Mapping[str, torch.Tensor]) -> None:
        locs = locs_of_places(self._pool, space, now.written)
        for name, words in self._attention.stored(layer, self._model.normed(now.x), now.turned).items():
            targets[name].index_copy_(0, locs, words)

    def _read(self, now: _Pass, space: str, layer: int, sources: Mapping[str, torch.Tensor]) -> None:
        places = now.read[space]
        locs = locs_of_places(self._pool, space, self._backend.index(places.entries))
        rows = {name: words.index_select(0, locs) for name, words in sources.items()}
        keys, values = self._attention.keys_and_values(layer, rows)
        sizes = np.bincount(places.chunk, minlength=len(now.chunks)).tolist()
        by_chunk = zip(
            now.chunks,
            torch.split(self._model.normed(now.x), now.counts),
            torch.split(now.turned, now.counts),
            torch.split(now.positions, now.counts),
            torch.split(keys, sizes),
            torch.split(values, sizes),
            torch.split(torch.from_numpy(places.positions), sizes),
            strict=True,
        )
        mixed = []
        for chunk, x, turned, asked, key, value, seen in by_chunk:
            reads_itself = self._model.reads_itself(chunk.request_id)
            queries = self._attention.queries(layer, x, turned, reads_itself=reads_itself)
            hidden = self._hidden(space, asked, seen)
            scores = torch.einsum("thd,shd->hts", queries, key) / queries.shape[-1] ** 0.5
            chances = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            mixed.append(torch.einsum("hts,shd->thd", chances, value).flatten(1))
        now.x = now.x + torch.cat(mixed) @ self._model.weights(layer, "o_proj").T

    def _hidden(self, space: str, asked: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Which keys a query does not see, [t, s]. asked, seen: positions of queries and of keys."""
        hidden = seen > asked[:, None]
        if space == "window":
            firsts = torch.tensor([self._pool.attention.first_seen(position) for position in asked.tolist()])
            hidden |= seen < firsts[:, None]
        return hidden
