"""check_round_trip: saves a request, gives its slots to another one, restores it elsewhere, and judges every buffer.

    request 1    is saved, and restored into other slots
    request 2    keeps its slots
    request 3    gets every slot that is not request 2's, as soon as request 1 is saved

Invariants:
- The verdict on buffers uses only the rows that `load` restores, not the saved value.
- A change of padding is named, and is a finding only if it puts NaN where save reads.
- In save, `.to(device)` and `.cpu()` make copies, as for a pool on a device. On a CPU they would not.
- Save and load agree on a row for each id, another for each, not its own for all. If they raise, findings stay.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from kvcheck.testing.buffers import Buffer, RowTensor, RowUnits, find_buffers, layers_of, paths_text, shared_text
from kvcheck.testing.failures import Judged, NotJudged, settled
from kvcheck.testing.held_threads import HeldThreads
from kvcheck.testing.judge import TELLING, RowJudge, WrongRow, dump
from kvcheck.testing.late_saves import judge_late_save, saved_once
from kvcheck.testing.padding import LayerRows, Left, judge_left, named_and_left, times_saved, untouched
from kvcheck.testing.plan import BYSTANDER, NEXT, SAVED, SlotScene, conclude, ids_text, scene_of, seed_of
from kvcheck.testing.reached import HeldTensor, Passed, bytes_of, is_readable, reached
from kvcheck.testing.streams import Streams, active_streams

__tracebackhide__ = True

Saved = TypeVar("Saved")


def check_round_trip(
    pool: object,
    *,
    save: Callable[[Any], Saved],
    load: Callable[[Saved, Any], object],
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
    """Judge that a saved request is restored completely, and that its copy has memory of its own.

    Every tensor below `pool` is overwritten with words that identify request, position, buffer and layer. Then `copy =
    save(ids)` runs, another request gets the slots, `load(copy, into)` runs, and every row of every buffer is compared.

    slots: size of the tensors' dimension that ids number. page_size: ids per page; a tensor with one row per page is
    judged by whole pages. ids, into: slots of the request before and after, drawn from the seed by default; they may
    share slots. padding: slots that belong to no request. exclude: names of tensors without KV, such as scratch memory,
    exact or with *. include: names of lists of ids to be judged all the same. unused: parts of rows without KV, such as
    alignment, by name, each as an index of a row: {"raw": slice(10, 16)}. as_ids: makes the argument of save and load
    from row numbers, by default an int64 tensor on the pool's device. unit: noun for what an id numbers, in messages;
    by default "row", or "token" with page_size=. seed: of the draw.

    Raises IntegrityError with the findings: KV304 for a buffer that load left unchanged, KV102 for bytes of another
    request, KV301 for another position, KV305 for a saved value that shares memory with the pool, KV403 for another
    request's row that load changed. Inside `streams()` save and load are called again with save's streams late: KV203
    for a copy that was taken too early. Raises NotJudged if a tensor cannot be judged, or if save and load keep ids in
    other rows. Work that save or load gives to other threads runs as late as the call allows.

    A pass means that this save and this load moved these rows bit for bit on this device. Not covered: lossy copies,
    copies that a device runs after save returns, other sizes, and memory that no attribute of the pool leads to.
    """
    units = RowUnits(slots=slots, page_size=page_size, unit=unit)
    look = partial(find_buffers, pool, units, exclude=exclude, include=include, unused=unused)
    scene = scene_of(look, units, ids, into, padding, as_ids, seed_of(seed))
    judge, plan = scene.judge, scene.plan
    streams = active_streams()
    if streams is not None:
        streams.release()
        streams.report()
    scene.mark_all()
    _check_kept(scene)
    with _noting_pages(page_size):
        copy, threaded = saved_once(scene.found, save, scene.ids())
    scene.wait_for_device()
    _check_saved_nothing_else(scene)
    _check_keeps_no_copies(scene)
    made, ways_back = _saved_tensors(copy, pool, exclude)
    saved = [(each, bytes_of(each.tensor)) for each in made]
    padded = judge_padding(scene, "save", saved, {})
    beside = _saved_beside(scene, saved)
    scene.mark(NEXT, (*plan.free, *plan.ids))
    left = (*scene.found.not_tried, *beside, *_not_copied((*ways_back, *_judge_saved(scene, saved)), saved))
    if judge.findings:  # load would read what the next owner wrote
        return conclude(settled(judge.findings, judge.words, judge.reads, not_tried=(*left, *padded.values(), "load")))
    judge.calls.append(f"load(copy, {ids_text(plan.into)})")
    with HeldThreads() as held, _noting_pages(page_size):
        held.call(load, copy, scene.into())
        still, padded = _judge_load(scene, saved, padded, is_early=bool(held.unrun))
    ids_notes = check_not_translated(scene, save, load) if judge.findings and not held.unrun else ()
    late = _late_copies(scene, streams, save, load, seed_of(seed))
    left += (*still, *padded.values(), *late, *threaded, *held.notes, *ids_notes)
    return conclude(settled(judge.findings, judge.words, judge.reads, not_tried=left))


def _judge_load(
    scene: SlotScene, saved: Sequence[tuple[HeldTensor, torch.Tensor]], padded: Mapping[str, str], *, is_early: bool
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return notes on what could not be judged of a load, and on padding. is_early: its threads have not run."""
    scene.look_again()
    if is_early:
        scene.judge.early = "; load returned while its work in another thread had not run: let load wait for that"
    return _judge_loaded(scene, saved), judge_padding(scene, "load", saved, padded)


def _not_copied(ways_back: Sequence[HeldTensor], saved: Sequence[object]) -> tuple[str, ...]:
    """Return notes on a saved value that leads back to the pool, or has no tensor."""
    if ways_back:
        return (f"{paths_text(ways_back)}: rows of others too, which is a way back to the pool and no copy",)
    return () if saved else ("the saved value: no tensor was found in it",)


@contextmanager
def _noting_pages(page_size: int) -> Iterator[None]:
    try:
        yield
    except IndexError as error:
        if page_size > 1:
            way = f"pass as_ids=lambda ids: torch.tensor(ids[::{page_size}]) // {page_size}"
            error.add_note(f"kvcheck: with page_size={page_size} an id numbers a token; for ids of pages, {way}")
        raise


def _late_copies(
    scene: SlotScene,
    streams: Streams | None,
    save: Callable[[Any], Saved],
    load: Callable[[Saved, Any], object],
    seed: int,
) -> tuple[str, ...]:
    if streams is None:
        is_on_device = any(each.rows.is_cuda for each in scene.found.buffers)
        return ("save: no copy of it was late; call it inside streams() for that",) if is_on_device else ()
    if scene.judge.findings:
        return ("save: no copy of it was late, as there are findings without",)
    return (*judge_late_save(scene, streams, save, load, seed), *streams.report().limits)


def _check_kept(scene: SlotScene) -> None:
    plan, buffers = scene.plan, scene.found.buffers
    for held in buffers:
        rows = scene.rows(held, [*plan.ids, *plan.held, *plan.free])
        seen, wanted = held.read(rows), scene.judge.ownership.wanted(held, rows)
        wrong = torch.nonzero((seen != wanted).any(1)).view(-1).tolist()
        if wrong:
            other = scene.judge.ownership.buffer_of(held, seen[wrong[0]], buffers)
            whose = f"another buffer ({other[0].where})" if other is not None else "other rows, or another buffer,"
            raise NotJudged(
                f"{held.where}, does not keep what is written to {held.unit} {rows[wrong[0]]}: {whose} shares its "
                f"memory. Give each its own, or leave out one that holds no KV, as with exclude=({held.path!r},)"
            )


def _check_saved_nothing_else(scene: SlotScene) -> None:
    for held in scene.found.buffers:
        rows = scene.rows(held, [*scene.plan.held, *scene.plan.free])
        seen, wanted = held.read(rows), scene.judge.ownership.wanted(held, rows)
        if not torch.equal(seen, wanted):
            at = int(torch.nonzero((seen != wanted).any(1))[0])
            owner = scene.judge.ownership.owners[held.unit, rows[at]].request
            raise NotJudged(
                f"save changed {held.unit} {rows[at]} of {held.where}, which request {owner} owns. "
                f"If save keeps values there, or it is scratch memory, pass exclude=({held.path!r},); if it holds KV, "
                "save must not write it"
            )


def _check_keeps_no_copies(scene: SlotScene) -> None:
    """A single value is no copy: freed rows are cleared or poisoned with one."""
    for held in scene.found.buffers:
        rows = scene.rows(held, scene.plan.ids)
        seen, wanted = held.read(rows), scene.judge.ownership.wanted(held, rows)
        elements = seen.view(len(rows), -1, held.rows.element_size())
        changed = (elements != wanted.view_as(elements)).any(2)
        if len(torch.unique(elements[changed], dim=0)) > 1:
            at = int(torch.nonzero(changed.any(1))[0])
            raise NotJudged(
                f"save wrote values to {held.unit} {rows[at]} of {held.where}, which request {SAVED} owns. "
                f"If save keeps copies in {held.path}, as in a mirror on the host, pass exclude=({held.path!r},); "
                "kvcheck gives these rows to the next request, and the copies would be lost"
            )


def _saved_tensors(
    copy: object, pool: object, exclude: Collection[str]
) -> tuple[tuple[HeldTensor, ...], tuple[HeldTensor, ...]]:
    """Return tensors of the saved value: copies, and whole tensors of the pool."""
    own = {_place(each.tensor) for each in reached(pool, passed=Passed(exclude)) if is_readable(each.tensor)}
    found = [each for each in reached(copy, root="copy", but=(pool,)) if is_readable(each.tensor)]
    copies = tuple(each for each in found if _place(each.tensor) not in own)
    return copies, tuple(each for each in found if _place(each.tensor) in own)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _judge_saved(scene: SlotScene, saved: Sequence[tuple[HeldTensor, torch.Tensor]]) -> list[HeldTensor]:
    """Find saved tensors that are no copies. Return views of the pool with rows of other requests."""
    judge, plan, ways_back = scene.judge, scene.plan, list[HeldTensor]()
    for each, before in saved:
        judge.count("saved", len(before), 1)
        now = bytes_of(each.tensor)
        wrong = torch.nonzero(now != before).view(-1)
        shared = {held.key: (held, taken) for held in scene.found.buffers if (taken := held.rows_in(each.tensor))}
        if not shared and not len(wrong):
            continue
        if any(taken & {*scene.rows(held, (*plan.held, *plan.free))} for held, taken in shared.values()):
            ways_back.append(each)
            continue
        held, row = None, None
        told = "changed when its slots were given away"
        if shared:
            held, taken = next(iter(shared.values()))
            row = next((row for row in scene.rows(held, plan.ids) if row in taken), None)
            told = f"shares its memory with {held.where if row is None else f'{held.unit} {row} of {held.where}'}"
        dumps: dict[str, object] = {}
        if len(wrong):
            dumps = {"seen": dump(now, int(wrong[0])), "wanted": dump(before, int(wrong[0]))}
        judge.find(
            "KV305",
            "aliasing",
            f"what save returned for request {SAVED} is no copy: {each.path} {told}, which request {NEXT} owns now",
            held,
            None if not dumps else WrongRow("KV305", told, 0, 1, NEXT, dumps),
            row=row,
            request=SAVED,
            seen_request=NEXT,
        )
    return ways_back


def _saved_beside(scene: SlotScene, saved: Sequence[tuple[HeldTensor, torch.Tensor]]) -> tuple[str, ...]:
    kept = [bytes(bits.tolist()) for _, bits in saved]

    def times(match: RowTensor) -> list[int]:
        rows = (held.read(scene.rows(held, scene.plan.ids)[:1]) for held in layers_of(match, scene.units))
        return [times_saved(row, kept) for row in rows if row.numel() >= TELLING]

    shared: dict[tuple[str, str], list[HeldTensor]] = {}
    for part, whole in scene.found.within:
        often = max(times(part), default=0)
        if any(often > count > 0 for count in times(whole)):
            shared.setdefault((part.held.stem, whole.held.stem), []).extend((part.held, whole.held))
    return tuple(map(shared_text, shared.values()))


def _judge_loaded(scene: SlotScene, saved: Sequence[tuple[HeldTensor, torch.Tensor]]) -> tuple[str, ...]:
    """Return notes on parts that could not be judged, or raise NotJudged with them if there are no findings."""
    judge, plan, buffers = scene.judge, scene.plan, scene.found.buffers
    parts: list[Left] = []
    unmoved: dict[str, list[tuple[Buffer, WrongRow]]] = {}
    lossy: list[str] = []
    before = {held.key: scene.wanted(held.whole, plan.into) for held in buffers}
    layers: dict[tuple[str, int | None], tuple[Buffer, LayerRows]] = {}
    bits = [each for _, each in saved]
    everybody = [*plan.ids, *plan.held, *plan.free]
    others = [number for number in everybody if number not in set(plan.into)]
    for held in buffers:
        _judge_others(scene, held, others)
    scene.give(SAVED, plan.into)
    for held in buffers:
        rows = scene.rows(held, plan.into)
        whole = LayerRows(before[held.key], held.whole.read(rows), scene.wanted(held.whole, plan.into))
        layers[held.key] = held, whole
        if (named := named_and_left(held, whole)) is not None:
            parts.append(named)
        former, seen, wanted = map(held.kept, (whole.before, whole.seen, whole.wanted))
        wrong = judge.compare(held, rows, seen, wanted)
        if wrong is None:
            continue
        if torch.equal(seen, former):
            unmoved.setdefault(held.name, []).append((held, wrong))
        elif wrong.code == "KV105" and wrong.rows == len(rows) and held.dtype.is_floating_point:
            lossy.append(held.where)
            continue
        elif (columns := untouched(held, former, seen, wanted, bits)) is not None:
            parts.append(Left(held, columns, wrong))
            continue
        judge.find(
            wrong.code,
            "content",
            f"restored after its slots were reused: {held.unit} {rows[wrong.at]} of {held.where}, holds {wrong.story}"
            f"{_source(scene, held, wrong, rows[wrong.at], scene.rows(held, plan.ids)[wrong.at])}; "
            f"expected request {SAVED}, position {wrong.at}; {wrong.rows} of {len(rows)} {held.units} are "
            f"wrong{judge.early}",
            held,
            wrong,
            row=rows[wrong.at],
            request=SAVED,
        )
    gone = {held.key for some in unmoved.values() for held, _ in some}
    for some in unmoved.values():
        first = some[0][0]
        moved = [held for held in buffers if held.family == first.family and held.key not in gone]
        _find_unmoved(judge, some, scene.rows(first, plan.into), moved)
    still = judge_left(judge, parts, layers, bits, SAVED)
    if lossy and not judge.findings:
        raise NotJudged(
            f"{lossy[0]}: every restored row holds bytes that nobody wrote, as after a copy to a narrower type. "
            "kvcheck judges copies that keep every bit; exclude the buffer, or compare its values in a test of your own"
        )
    if still and not judge.findings:
        raise NotJudged("; ".join(still))
    return tuple(still)


def _find_unmoved(
    judge: RowJudge, parts: Sequence[tuple[Buffer, WrongRow]], rows: Sequence[int], others: Sequence[Buffer]
) -> None:
    """others: layers of the same buffer that load has written, which show that it holds KV."""
    held, wrong = parts[0]
    names = ", ".join(repr(each.path) for each, _ in parts) if others else repr(held.name)
    wrote = f"; load wrote {others[0].path}" if others else ""
    way = judge.early or f"; if it holds no KV, pass exclude=({names},)"
    layers = [str(each.layer) for each, _ in parts if each.layer is not None]
    where = f"{held.name}, layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}" if layers else held.name
    judge.find(
        "KV304",
        "contract",
        f"request {SAVED} came back without {where}: load left all {len(rows)} {held.units} as they were, {held.unit} "
        f"{rows[wrong.at]} with {wrong.story}{wrote}{way}",
        held,
        wrong,
        row=rows[wrong.at],
        request=SAVED,
    )


def _judge_others(scene: SlotScene, held: Buffer, others: Sequence[int]) -> None:
    judge, rows = scene.judge, scene.rows(held, others)
    wrong = scene.compare(held, others)
    if wrong is not None:
        owner = judge.ownership.owners[held.unit, rows[wrong.at]].request
        page = held.split or 1
        is_last = rows[wrong.at] >= len(held.rows) * page - page
        source = _source(scene, held, wrong, rows[wrong.at])
        way = "; if the last slot is reserved, pass padding=(-1,)" if is_last else ""
        judge.find(
            "KV403",
            "lifetime",
            f"load for request {SAVED} changed {held.unit} {rows[wrong.at]} of {held.where}, which request {owner} "
            f"owns: it holds {wrong.story}{source}; {held.units} of others that changed: {wrong.rows}{way}",
            held,
            wrong,
            row=rows[wrong.at],
            request=SAVED,
            seen_request=owner,
        )


def _source(scene: SlotScene, held: Buffer, wrong: WrongRow, row: int, *saved: int) -> str:
    """Return the row to which the bytes of `row` belong, if it is another one. saved: the row that belongs there."""
    plan = scene.plan
    owned = {SAVED: plan.into, BYSTANDER: plan.held, NEXT: (*plan.free, *plan.ids)}
    if wrong.position is None or wrong.seen_request not in owned:
        return ""
    source = scene.rows(held, owned[wrong.seen_request])[wrong.position]
    beside = [f", one beside {held.unit} {near}" for near in (row, *saved) if abs(near - source) == 1]
    word = "meant for" if wrong.seen_request == SAVED else "from"
    return "" if source == row else f", {word} {held.unit} {source}{''.join(beside[:1])}"


def judge_padding(
    scene: SlotScene, writer: str, saved: Sequence[tuple[HeldTensor, torch.Tensor]], known: Mapping[str, str]
) -> dict[str, str]:
    """Add notes on changed padding to `known`. NaN or infinity that save reads is a finding: padded reads get it."""
    judge = scene.judge
    changed: dict[str, list[Buffer]] = {}
    story: dict[str, str] = {}
    kept = [bytes(bits.tolist()) for _, bits in saved]
    for held in scene.found.buffers:
        rows = scene.rows(held, scene.plan.padding)
        seen, wanted = held.read(rows), judge.ownership.wanted(held, rows)
        wrong = judge.differs(held, rows, seen, wanted)
        if held.family in known or wrong is None:
            continue
        odd = _not_finite(held, seen)
        holds = "NaN or infinity" if odd else wrong.story
        at = odd[0] if odd else wrong.at
        story[held.family] = f"{held.unit} {rows[at]} is padding, and {writer} changed it: it holds {holds}"
        read = [at for at in odd if held.size >= TELLING and times_saved(wanted[at], kept)]
        for at in read[:1]:
            first = judge.differs(held, rows[at:], seen[at:], wanted[at:])
            why = f"{held.unit} {rows[at]} of {held.where} is padding, and {writer} put NaN or infinity into it. save "
            why += "reads it, so that padded reads get it"
            judge.find("KV403", "lifetime", why, held, first, row=rows[at], request=SAVED)
        if not read:
            changed.setdefault(held.family, []).append(held)
    told = {
        family: f"{', '.join(held.path for held in some)}: {story[family]}. It is nobody's, so it is not judged; "
        "padding=() with ids= and into= judges it"
        for family, some in changed.items()
    }
    return {**known, **told}


def _not_finite(held: Buffer, rows: torch.Tensor) -> list[int]:
    if not (held.dtype.is_floating_point or held.dtype.is_complex):
        return []
    values = rows.view(held.dtype)
    numbers = (torch.view_as_real(values) if held.dtype.is_complex else values).double()
    return torch.nonzero(~numbers.isfinite().flatten(1).all(1)).view(-1).tolist()


def check_not_translated(
    scene: SlotScene, save: Callable[[Any], Any], load: Callable[[Any, Any], object]
) -> tuple[str, ...]:
    """Raise NotJudged if save and load translate ids by the same map. Gives all rows other content. Return why that
    could not be found out."""
    size = scene.units.page_size
    pages = sorted({number // size for number in (*scene.plan.ids, *scene.plan.into)})
    scene.mark(SAVED, range(scene.units.slots))
    try:
        rounds = {page: _kept(scene, save, load, page) for page in pages}
    except Exception as error:
        return (f"whether ids are row numbers: of an id alone, {type(error).__name__}; if they are not, pass as_ids=",)
    for held in scene.found.buffers:
        rows = {page: kept.get(held.key) for page, kept in rounds.items()}
        moved = {page: row for page, row in rows.items() if row != page}
        if moved and None not in rows.values() and len(set(rows.values())) == len(rows):
            noun = "page" if size > 1 else held.unit
            told = ", ".join(f"id {page} is kept in {noun} {row}" for page, row in [*moved.items()][:3])
            raise NotJudged(
                f"{told} of {held.where}, by save and load alike. That is no error, but kvcheck takes ids as row "
                "numbers: pass as_ids= with the translation from rows to your ids, such as "
                "as_ids=lambda rows: torch.tensor([id_of[row] for row in rows])"
            )
    return ()


def _kept(
    scene: SlotScene, save: Callable[[Any], Any], load: Callable[[Any, Any], object], page: int
) -> dict[object, int]:
    """Return the page that save reads and load writes for this id, by buffer. Others are left out."""
    size, everything = scene.units.page_size, range(scene.units.slots)
    ids, found = [*range(page * size, (page + 1) * size)], scene.found.buffers
    before = [held.whole.read(scene.rows(held, everything)) for held in found]
    copy, _ = saved_once(scene.found, save, scene.make(ids))
    scene.wait_for_device()
    for held, rows in zip(found, before, strict=True):
        held.write(scene.rows(held, everything), rows.roll(1, 0))
    load(copy, scene.make(ids))
    scene.look_again()
    kept: dict[object, int] = {}
    for held, rows in zip(scene.found.buffers, before, strict=True):
        numbers, was, put = scene.rows(held, everything), held.kept(rows), held.kept(rows.roll(1, 0))
        seen = held.read(numbers)
        changed = torch.nonzero((seen != put).any(1)).view(-1)
        at = {number * scene.units.pages // len(seen) for number in changed.tolist()}
        if held.size >= TELLING and len(at) == 1 and torch.equal(seen[changed], was[changed]):
            kept[held.key] = at.pop()
        held.write(numbers, rows)
    return kept
