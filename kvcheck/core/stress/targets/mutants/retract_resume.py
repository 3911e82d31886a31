"""Bug a put back, piece by piece: data that a retracted request loses, keeps too long, or shares."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Footprint, Signal
from kvcheck.core.cache.offload import Offload, OffloadedBuffer, OffloadedKV
from kvcheck.core.cache.pools.buffers import BufferSet, BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import Extent, Holding
from kvcheck.core.cache.scheduler.decode import DecodeScheduler
from kvcheck.core.cache.transfer.metadata import MetadataBuffers, MetadataRow
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.target import FIXED


class ViewMetadata(MetadataBuffers):
    def get(self, slot: int, request: int) -> MetadataRow:
        self._slots.check_owner(slot, request)
        return MetadataRow(self.row_view(slot), self.fields)


class UnclearedMetadata(MetadataBuffers):
    def clear(self, slot: int) -> None:
        """Nothing is cleared."""


def _without_index(table: tuple[tuple[str, BufferSpec], ...]) -> tuple[tuple[str, BufferSpec], ...]:
    return tuple(row for row in table if row[1].name != "index_k_with_scale")


class SaveSkipsIndex(Offload):
    def _table(self) -> tuple[tuple[str, BufferSpec], ...]:
        return _without_index(self.pool.buffers())


class RestoreSkipsIndex(Offload):
    def restored_buffers(self, offloaded: OffloadedKV) -> tuple[OffloadedBuffer, ...]:
        return tuple(kept for kept in offloaded.buffers if kept.name != "index_k_with_scale")


class SaveTakesNextPages(Offload):
    """Index pages are computed one too high, as by a ceiling in the place of a floor."""

    def _saved_rows(self, extent: Extent, space: str, buffer: BufferSpec) -> IndexArray:
        rows = super()._saved_rows(extent, space, buffer)
        if buffer.rows is not Granularity.PAGE:
            return rows
        shifted: IndexArray = rows % self.pool.sizes.pages + 1
        return shifted


class AliasingOffload(Offload):
    """The value keeps the pool's own tensor and the row ids, and gathers at the restore."""

    def save(self, holding: Holding) -> OffloadedKV:
        value = super().save(holding)
        self._backend.wait(value.saved)
        self.discard(value)
        kept = []
        extent = self.pool.extent(holding, value.tokens)
        for space, buffer in self.pool.buffers():
            rows = extent.rows(space, buffer)
            source = self.pool.sets[space].write_view(buffer.name)
            start, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
            view = source[:, start:stop] if stop - start == len(rows) else source[:, : len(rows)]
            kept.append(OffloadedBuffer(space=space, name=buffer.name, words=view, memory=""))
        return replace(value, buffers=tuple(kept))

    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        done = super().restore(offloaded, holding)
        self._backend.wait(done)
        return done

    def discard(self, offloaded: OffloadedKV) -> None:
        """Views own no memory."""
        if offloaded.buffers and offloaded.buffers[0].memory:
            super().discard(offloaded)


class DeclaresLess(Offload):
    def _footprint(self, extent: Extent, space: str, buffer: BufferSpec, *, whole: bool = False) -> Footprint:
        named = super()._footprint(extent, space, buffer, whole=whole)
        spans = None if named.spans is None else named.spans[:-1]
        owners = None if named.owners is None else named.owners[:-1]
        return replace(named, rows=named.rows[:-1], spans=spans, owners=owners)


class DropsBeforeRestored(Offload):
    def restore(self, offloaded: OffloadedKV, holding: Holding) -> Signal:
        done = super().restore(offloaded, holding)
        self._kept[offloaded.number].copies.clear()
        super().discard(offloaded)
        return done

    def discard(self, offloaded: OffloadedKV) -> None:
        if offloaded.number in self._kept:
            super().discard(offloaded)


class FreeKeepsIndex(BufferSet):
    def free(self) -> None:
        for buffer in self.spec.buffers:
            if buffer.name != "index_k_with_scale":
                self._backend.release(self.memory_name(buffer.name))
        self._words.clear()


class RefeedingScheduler(DecodeScheduler):
    def _resumed_length(self, offloaded: OffloadedKV) -> int:
        return offloaded.tokens + 1


UPSTREAM = "SGLang #23346 (GLM-5.1, retract and resume on the decode node)"

_mutant = partial(
    Mutant,
    bug="a",
    scenario="retract-resume",
    shape="glm-5.1-tiny",
    killed_by="contract",
    code="KV304",
)
RETRACT_RESUME: tuple[Mutant, ...] = (
    _mutant(
        name="metadata-get-returns-views",
        parts=replace(FIXED, metadata=ViewMetadata),
        killed_by="aliasing",
        code="KV305",
        shows="A request keeps slices of a metadata slot instead of an owned copy of its row.",
        matters="The slot's next owner overwrites the draft seed and log-probabilities of a request that still runs.",
        example=f"{UPSTREAM}: get_buf returned slices of shared storage.",
    ),
    _mutant(
        name="offload-skips-index-buffer",
        parts=replace(FIXED, offload=SaveSkipsIndex),
        shows="The index buffer of an NSA pool is not saved on retract.",
        matters="After resume the indexer picks tokens from other requests' keys: wrong top-k, garbled long contexts.",
        example=f"{UPSTREAM}: only the latent rows were copied to the host.",
    ),
    _mutant(
        name="restore-skips-index-buffer",
        parts=replace(FIXED, offload=RestoreSkipsIndex),
        shows="The index buffer is saved, but not written back on resume.",
        matters="Half a fix: the save costs time and the reader still sees the pages' previous owners.",
        example=f"{UPSTREAM}: the return types of save and restore differed by pool.",
    ),
    _mutant(
        name="free-keeps-index-buffer",
        parts=replace(FIXED, buffers=FreeKeepsIndex),
        killed_by="accounting",
        code="KV401",
        shows="Clearing an NSA pool leaves its index buffer allocated.",
        matters="Device memory is lost each time a pool is rebuilt.",
        example=f"{UPSTREAM}: the clear of the pool class did not know the buffer its subclass had added.",
    ),
    _mutant(
        name="offload-saves-wrong-pages",
        parts=replace(FIXED, offload=SaveTakesNextPages),
        killed_by="content",
        code="KV102",
        shows="The index buffer is saved from the page after each of the request's pages.",
        matters="Everything is copied, sizes match, and the bytes are a neighbour's.",
        example="Page ids derived from token slots with the wrong rounding.",
    ),
    _mutant(
        name="resume-refeeds-token",
        parts=replace(FIXED, decode_scheduler=RefeedingScheduler),
        code="KV301",
        shows="A resumed request counts the token it sampled last as committed; its KV was never written.",
        matters="Attention reads a row that still holds another request's token, and the prefix tree may share it.",
        example=f"{UPSTREAM}: fill_ids was one longer than the allocated KV.",
    ),
    _mutant(
        name="metadata-slot-not-cleared",
        parts=replace(FIXED, metadata=UnclearedMetadata),
        killed_by="content",
        code="KV102",
        shows="A freed metadata slot keeps all fields of its previous request.",
        matters="Fields that the next request does not use travel with it: another user's log-probabilities.",
        example="SGLang until 0.5.13: a slot kept its previous bootstrap room, and unused fields were never cleared.",
    ),
    _mutant(
        name="offload-value-aliases-pool",
        parts=replace(FIXED, offload=AliasingOffload),
        killed_by="aliasing",
        code="KV305",
        shows="The offloaded value refers to the pool's memory instead of holding the bytes.",
        matters="The value is right only until the pages are reused, and retraction frees them for that.",
        example="A copy to the device that the tensor already lies on returns the same storage.",
    ),
    _mutant(
        name="offload-declares-one-page-less",
        parts=replace(FIXED, offload=DeclaresLess),
        shape="llama-3-tiny",
        killed_by="audit",
        code="KV306",
        shows="A copy touches one page more than its footprint names.",
        matters="Nothing judges the order of that page, so a missing wait on it is never found.",
        example="A footprint that is computed from another length than the index list of the copy.",
    ),
    _mutant(
        name="value-dropped-before-restored",
        parts=replace(FIXED, offload=DropsBeforeRestored),
        shape="llama-3-tiny",
        killed_by="lifetime",
        code="KV202",
        shows="The host memory of an offloaded value is given back while its restore still reads it.",
        matters="Pinned memory goes back to a cache of blocks; the next copy to the host overwrites what is read.",
        example="A value whose last reference ends when the restore has been queued on another stream.",
    ),
)
