"""waits: checks that a reader of a layer waits for the load of that layer, also when the load is late."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from kvcheck.testing.buffers import Buffer, RowUnits, find_buffers
from kvcheck.testing.failures import Judged, NotJudged, settled
from kvcheck.testing.late_saves import judge_late_save, saved_once
from kvcheck.testing.plan import BYSTANDER, NEXT, SAVED, SlotScene, conclude, ids_text, scene_of, seed_of
from kvcheck.testing.reached import bytes_of, is_readable, overlap, reached
from kvcheck.testing.round_trip import judge_padding
from kvcheck.testing.streams import Streams

__tracebackhide__ = True

STALE = ("KV101", "KV102", "KV103", "KV104")
"""Codes of rows that the load has not reached, or only in part."""
LATE_AT_RANDOM = 3
"""Every third seed advances the load between other calls; the others hold it until a wait."""

Reader = Callable[[int, Any], object]
"""(layer, slots) -> the rows that it reads."""
LayerReader = Callable[[Any], object]

Saved = TypeVar("Saved")


def waits(
    pool: object,
    *,
    streams: Streams,
    save: Callable[[Any], Saved],
    load: Callable[[Saved, Any], object],
    read: Reader | Mapping[str, Reader],
    layers: int | Sequence[int],
    slots: int,
    page_size: int = 1,
    ids: Sequence[int] | None = None,
    into: Sequence[int] | None = None,
    padding: Collection[int] = (0,),
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    unused: Mapping[str, object] | None = None,
    as_ids: Callable[[list[int]], object] | None = None,
    unit: str | None = None,
    seed: int | None = None,
) -> Judged:
    """Judge that `read(layer, ids)` waits for the work that `load(copy, ids)` puts on a stream of its own.

    Call it inside `with streams() as held:` and make the pool there, so that its torch.cuda.Stream and Event are
    kvcheck's. A copy is saved. Then, for each reader and layer, the slots get another request's rows, `load` is called
    and held back, and the rows that the reader returns are compared with the saved ones. Last, save is called again
    with its own streams late, and its result is loaded and compared.

    read: returns rows of these slots, or whole buffers of the layer, as a tensor or in lists, tuples, mappings or
    objects. Pass several readers as a mapping by name; a wait of one does not count for another. layers: their number,
    or their ids. The other parameters are those of check_round_trip.

    Raises IntegrityError with KV201 for rows that were read before they were loaded, and with KV203 for a copy that
    save took before its stream had made it. Raises NotJudged if nothing ran on a stream, or if `read` returns no row of
    a buffer even after the load.

    A pass covers this reader, this load and the order that was tried. With stand-in streams a reader without a wait is
    always found, also one that waits for the event of an earlier layer. A longer wait than needed is no finding, nor is
    a wait for the whole load at the first layer, if layers are read in the order of `layers`. Not covered: other
    threads, C++ extensions with streams of their own, buffers that `read` does not return (the result names them), and
    a load whose source is reused too early.
    """
    units = RowUnits(slots=slots, page_size=page_size, unit=unit)
    drawn = seed_of(seed)
    look = partial(find_buffers, pool, units, exclude=exclude, include=include, unused=unused)
    scene = scene_of(look, units, ids, into, padding, as_ids, drawn)
    late = _LateLoads(scene, streams)
    named = list(range(layers)) if isinstance(layers, int) else list(layers)
    streams.release()
    streams.report()
    scene.mark_all()
    scene.judge.calls.append(f"load(copy, {ids_text(scene.plan.into)})")
    copy, threaded = saved_once(scene.found, save, scene.ids())
    streams.release()

    def begin() -> None:
        late.give_to_next()
        scene.wait_for_device()  # what another stream loads must not overtake it
        load(copy, scene.into())

    readers: Mapping[str, Reader] = read if isinstance(read, Mapping) else {"read": read}
    for name, reader in readers.items():
        reads = {layer: partial(reader, layer) for layer in named}
        for at, layer in [*enumerate(named)][:: 1 if drawn % 2 == 0 else -1]:
            late.race(begin, [reads[each] for each in named[: at + 1]], name, layer, drawn)
    right, padded = late.restored(begin)
    saves = judge_late_save(scene, streams, save, load, drawn, keys=right)
    return conclude(late.judged(len(named) * len(readers), (*padded, *saves, *threaded)))


@dataclass(slots=True)
class _LateLoads:
    scene: SlotScene
    streams: Streams
    shown: set[tuple[str, int | None]] = field(default_factory=set)
    """Keys of buffers with a row that a reader returned."""
    in_order: dict[str, None] = field(default_factory=dict)
    """Notes on reads that are right only after reads of earlier layers."""
    without_order: dict[str, None] = field(default_factory=dict)
    """Notes on reads on which no order was imposed."""

    def restored(self, begin: Callable[[], None]) -> tuple[set[object], tuple[str, ...]]:
        """Return the keys of buffers that a load without delay restores, and notes on the others and on padding."""
        begin()
        self.streams.release()
        self.scene.give(SAVED, self.scene.plan.into)
        padded = judge_padding(self.scene, "load", (), {})
        right: set[object] = set()
        for held in self.scene.found.buffers:
            if torch.equal(held.read(self._rows(held)), self._wanted(held)):
                right.add(held.key)
        odd = [held.where for held in self.scene.found.buffers if held.key not in right | self.shown]
        told = f"{'; '.join(odd)}: a load that runs at once does not restore it; check_round_trip says how it differs"
        return right, (*padded.values(), *([told] if odd else []))

    def judged(self, reads: int, left: tuple[str, ...]) -> Judged:
        judge, raced = self.scene.judge, reads - len(self.without_order)
        if self.without_order and not raced and not judge.findings:
            raise NotJudged(
                "the watchdog of the device ended a hold of every load, so no order was imposed on any read. A reader "
                "that copies to the host waits for the load in a way that is not seen: let it return what lies on the "
                "device. `kvcheck doctor` tries a hold, and with device='cpu' there are stand-ins"
            )
        unshown = dict.fromkeys(held.where for held in self.scene.found.buffers if held.key not in self.shown)
        unread = tuple(f"{where}: no reader returned a row of it" for where in unshown)
        not_tried = (
            *(*self.scene.found.not_tried, *self.in_order, *unread, *left),
            *(*self.without_order, *self.streams.report().limits),
        )
        return settled(judge.findings, judge.words, judge.reads, orderings=raced, not_tried=not_tried)

    def give_to_next(self) -> None:
        plan = self.scene.plan
        self.scene.mark(BYSTANDER, plan.held)
        self.scene.mark(NEXT, (*plan.free, *plan.ids))

    def understood(self, begin: Callable[[], None], read: LayerReader, what: str) -> list[Buffer]:
        self.streams.release()
        begin()
        self.streams.release()
        self.scene.give(SAVED, self.scene.plan.into)
        known: list[Buffer] = []
        odd: list[str] = []
        for tensor in _tensors(read(self.scene.into())):
            held = next((each for each in self.scene.found.buffers if self._is_of(tensor, each)), None)
            if held is None:
                odd.append(f"{list(tensor.shape)} of {tensor.dtype}".replace("torch.", ""))
            else:
                known.append(held)
        if odd or not known:
            told = f"{', '.join(odd)}, which is" if odd else "no tensor, and so"
            raise NotJudged(
                f"{what} returned {told} no row of a buffer as it was saved, though the load had finished. Let it "
                "return the rows as they lie in the buffers, and see whether check_round_trip passes"
            )
        return known

    def race(self, begin: Callable[[], None], reads: Sequence[LayerReader], reader: str, layer: int, seed: int) -> None:
        """Judge the last of `reads` during a late load. If it is early when read alone, it is read again after the
        others, since a reader may wait for the whole load at the first layer."""
        what = f"{reader} of layer {layer}"
        known = self.understood(begin, reads[-1], what)
        self.shown |= {held.key for held in known}
        seen = self._read_late(begin, reads[-1:], known, what, seed)
        if len(reads) > 1 and self._is_early(known, seen):
            after_others = self._read_late(begin, reads, known, what, seed)
            if not self._is_early(known, after_others):
                told = f"{reader}: a layer that is read alone; it waits where the layers are read in order"
                self.in_order[told] = None
                seen = after_others
        for held, rows in zip(known, seen, strict=True):
            self._judge(held, rows, reader, layer)

    def _read_late(
        self, begin: Callable[[], None], reads: Sequence[LayerReader], known: Sequence[Buffer], what: str, seed: int
    ) -> list[torch.Tensor]:
        self.streams.release()
        index = [held.index(self._rows(held)) for held in known]
        ids = [self.scene.into() for _ in reads]
        fired = self.streams.fired
        # After other reads the load runs only as far as a wait requires.
        self.streams.hold(seed, is_lazy=len(reads) > 1 or seed % LATE_AT_RANDOM != LATE_AT_RANDOM - 1)
        begin()
        self.streams.hold_no_more()  # a stream of the reader's own runs before the load, as far as it does not wait
        queued, loading = self.streams.queued, self.streams.progress()
        got = [_tensors(read(at)) for read, at in zip(reads, ids, strict=True)][-1]
        self.streams.finish_since(loading)
        if len(got) != len(known):
            raise NotJudged(f"{what} returned {len(got)} tensors during a load, and {len(known)} after one")
        # On a device a view of the buffer is read here, while the load is held, and not when it is compared.
        rows = [
            held.gathered(at) if overlap(tensor, held.rows) else tensor
            for tensor, held, at in zip(got, known, index, strict=True)
        ]
        taken = zip(self.streams.taken(rows), known, index, strict=True)
        seen = [bytes_of(tensor).reshape(len(at[0]), held.size) for tensor, held, at in taken]
        self.streams.release()
        if self.streams.fired > fired:
            self.without_order[f"{what} during a load that is late: the watchdog of the device ended a hold"] = None
        if not queued:
            raise NotJudged(
                "load put nothing on a stream of its own, so there was nothing to wait for. Make the pool and its "
                "streams inside the block of streams(), and see that load uses them on this machine"
            )
        self.scene.give(SAVED, self.scene.plan.into)
        return seen

    def _is_early(self, known: Sequence[Buffer], seen: Sequence[torch.Tensor]) -> bool:
        return any(not torch.equal(rows, self._wanted(held)) for held, rows in zip(known, seen, strict=True))

    def _judge(self, held: Buffer, seen: torch.Tensor, reader: str, layer: int) -> None:
        ids = self._rows(held)
        wrong = self.scene.judge.compare(held, ids, seen, self._wanted(held))
        if wrong is None:
            return
        early = wrong.code in STALE
        self.scene.judge.find(
            "KV201" if early else wrong.code,
            "content",
            f"{reader} of layer {layer} {'did not wait for its load' if early else 'during a load'}: {held.unit} "
            f"{ids[wrong.at]} of {held.where}, holds {wrong.story}; expected request {SAVED}, position {wrong.at}; "
            f"{wrong.rows} of {len(ids)} {held.units} are wrong",
            held,
            wrong,
            row=ids[wrong.at],
            request=SAVED,
            lane=reader,
            call=f"{reader}({layer}, {ids_text(self.scene.plan.into)})",
        )

    def _is_of(self, tensor: torch.Tensor, held: Buffer) -> bool:
        if overlap(tensor, held.rows):
            return torch.equal(held.read(self._rows(held)), self._wanted(held))
        count = len(self._rows(held))
        return tensor.numel() * tensor.element_size() == count * held.size and torch.equal(
            bytes_of(tensor).reshape(count, held.size), self._wanted(held)
        )

    def _rows(self, held: Buffer) -> list[int]:
        return self.scene.rows(held, self.scene.plan.into)

    def _wanted(self, held: Buffer) -> torch.Tensor:
        return self.scene.wanted(held, self.scene.plan.into)


def _tensors(got: object) -> list[torch.Tensor]:
    return [each.tensor for each in reached(got) if each.tensor.numel() and is_readable(each.tensor)]
