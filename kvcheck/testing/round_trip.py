"""check_round_trip: saves a request, gives its slots to another one, restores it elsewhere, and judges every buffer.

    request 1    is saved, and restored into other slots
    request 2    stays where it is all the time
    request 3    gets every slot that is not request 2's, as soon as request 1 is saved

Invariants:
- The saved value is not looked into for the verdict on buffers: only what `load` puts back counts.
- Rows of padding are neither written nor judged. Rows of request 1 are free once it is saved.
- In save, `.to(device)` and `.cpu()` make copies, as they do for a pool on a device. On a CPU they would not.
- save is called once. load is called once, unless what was saved is no copy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from kvcheck.core.base.rng import Rng
from kvcheck.core.probes.frame.copies_to_host import CopiesToHost
from kvcheck.testing.buffers import Buffer, Pool, Units, bytes_of, find_buffers, index_text, is_readable, rows_in
from kvcheck.testing.failures import Judged, NotJudged, settled
from kvcheck.testing.judge import RowJudge, Wrong
from kvcheck.testing.ownership import Ownership, dump
from kvcheck.testing.padding import index_of, untouched
from kvcheck.testing.reached import Held, Passed, reached
from kvcheck.testing.trial import conclude, seed_of

SAVED, BYSTANDER, NEXT = 1, 2, 3
MOST_PAGES = 4
"""Pages of a request, if the caller names no ids: two to so many."""

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
    unit: str = "token",
    seed: int | None = None,
) -> Judged:
    """Judge that a saved request comes back whole, alone, and from memory of its own.

    Every tensor below `pool` is found and overwritten with words that name request, position, buffer and layer. Then
    `copy = save(ids)`; another request gets the slots; `load(copy, into)`; and every row of every buffer is compared.

    slots: the size of the tensors' dimension that ids number. page_size: ids a page; a tensor with a row a page is
    judged by whole pages. ids, into: slots of the request before and after, drawn from the seed unless they are given;
    they may share slots. padding: slots that nobody owns. exclude: names of tensors that hold no KV, such as scratch
    memory, exact or with *. include: names of lists of ids to judge after all. unused: parts of
    rows that hold no KV, such as what aligns them, by name, each as an index of a row: {"raw": slice(10, 16)}. as_ids:
    makes what save and load get; without it, a tensor of int64 on the pool's device. unit: what an id numbers, for the
    messages. seed: of the draw.

    Raises IntegrityError with the findings: a buffer that load left as it was is KV304, bytes of another request are
    KV102, another position KV301, a saved value that shares memory with the pool KV305, and a row of somebody else that
    load changed is KV403. Raises NotJudged if a tensor cannot be judged and is not excluded.

    A pass says that this save and this load moved these rows bit for bit on this device, one after the other. It says
    nothing of copies that run later than save returns, unless CUDA's synchronisation covers them (see `waits`), of
    lossy copies, of memory that no attribute of the pool leads to, or of other sizes.
    """
    units = Units(slots=slots, page_size=page_size, name=unit)
    found = find_buffers(pool, units, exclude=exclude, include=include, unused=unused)
    plan = plan_of(units, ids, into, padding, seed_of(seed))
    make = as_ids if as_ids is not None else tensors_on(found.buffers[0].rows.device)
    judge = RowJudge(Ownership(), found.buffers)
    for request, owned in ((SAVED, plan.ids), (BYSTANDER, plan.held), (NEXT, plan.free)):
        mark(judge.ownership, found, units, request, owned)
    with CopiesToHost():
        copy = save(make(list(plan.ids)))
    wait_for_device(found)
    _check_saved_nothing_else(judge, found, units, plan)
    _check_keeps_no_copies(judge, found, units, plan)
    saved = [(each, bytes_of(each.tensor)) for each in _saved_tensors(copy, pool, exclude)]
    mark(judge.ownership, found, units, NEXT, (*plan.free, *plan.ids))
    ways_back = _judge_saved(judge, found, units, plan, saved)
    left = (*found.not_tried, *(ways_back if saved else ("the saved value: no tensor was found in it",)))
    if judge.findings:  # load would read what the next owner wrote
        return conclude(settled(judge.findings, judge.words, judge.reads, not_tried=(*left, "load")))
    load(copy, make(list(plan.into)))
    again = find_buffers(pool, units, exclude=exclude, include=include, unused=unused)
    if [each.key for each in again.buffers] != [each.key for each in found.buffers]:
        raise NotJudged(
            "load replaced tensors of the pool by others of another shape or name, which have no known content"
        )
    wait_for_device(again)
    judge.buffers = again.buffers
    still = _judge_loaded(judge, again, units, plan, saved)
    return conclude(settled(judge.findings, judge.words, judge.reads, not_tried=(*left, *still)))


@dataclass(frozen=True, slots=True)
class Plan:
    """The slots of the requests. held: the bystander's. free: all others but padding."""

    ids: tuple[int, ...]
    into: tuple[int, ...]
    held: tuple[int, ...]
    free: tuple[int, ...]


def plan_of(
    units: Units, ids: Sequence[int] | None, into: Sequence[int] | None, padding: Collection[int], seed: int
) -> Plan:
    """Whole pages for everybody. Drawn pages of before and after have one in common every other time."""
    mix = Rng(seed)
    padded = {number // units.page_size for number in padding}
    order: list[int] = []
    for page in range(units.pages):
        if page not in padded:
            order.insert(mix.below(len(order) + 1), page)
    count = min(2 + mix.below(MOST_PAGES - 1), max(1, len(order) // 4))
    first = _pages_of("ids", ids, units, padded) if ids is not None else None
    second = _pages_of("into", into, units, padded) if into is not None else None
    if first is None:
        first = order[: count if second is None else len(second)]
    if second is None:
        common = first[-1:] if mix.chance(1, 2) else []
        second = [*common, *[page for page in order if page not in first][: len(first) - len(common)]]
    rest = [page for page in order if page not in first and page not in second]
    if len(first) != len(second):
        raise NotJudged(f"expected as many slots in into= as in ids=, got {len(second)} and {len(first)} pages of them")
    if not rest:
        raise NotJudged(
            f"{units} with {len(padded)} of padding are too few for a request of {len(first)}, the slots that it comes "
            "back to, and somebody else beside them; give the pool more"
        )
    held = rest[: -(-len(rest) // 2)]
    free = [page for page in order if page not in first and page not in held]
    return Plan(*(_tokens(pages, units) for pages in (first, second, held, free)))


def _pages_of(name: str, ids: Sequence[int], units: Units, padded: Collection[int]) -> list[int]:
    """The pages of slots that a caller names. Raises NotJudged unless they are whole pages, each once."""
    given = [int(number) for number in ids]
    pages = [number // units.page_size for number in given[:: units.page_size]]
    if not given or list(_tokens(pages, units)) != given or len(set(pages)) != len(pages):
        raise NotJudged(f"{name}={given}: expected slots that are whole pages of {units.page_size} in order, each once")
    if odd := [page for page in pages if page in padded or not 0 <= page < units.pages]:
        raise NotJudged(f"{name}={given}: page or slot {odd[0]} is padding, or none of {units}; see padding=")
    return pages


def _tokens(pages: Sequence[int], units: Units) -> tuple[int, ...]:
    size = units.page_size
    return tuple(page * size + offset for page in pages for offset in range(size))


def rows_named(ids: Sequence[int], unit: str, units: Units) -> list[int]:
    """The rows of a buffer that slots take: themselves, or their pages."""
    is_by_page = unit == "page" and units.page_size > 1
    return [number // units.page_size for number in ids[:: units.page_size]] if is_by_page else list(ids)


def mark(ownership: Ownership, found: Pool, units: Units, request: int, ids: Sequence[int]) -> None:
    """Make the request the owner of these slots and write its content to them, in every buffer."""
    for unit in dict.fromkeys(each.unit for each in found.buffers):
        ownership.write(found.buffers, unit, request, rows_named(ids, unit, units))


def give(ownership: Ownership, found: Pool, units: Units, request: int, ids: Sequence[int]) -> None:
    """Make the request the owner of these slots, and write nothing."""
    for unit in dict.fromkeys(each.unit for each in found.buffers):
        ownership.give(unit, request, rows_named(ids, unit, units))


def tensors_on(device: torch.device) -> Callable[[list[int]], object]:
    """What save and load get unless the caller says otherwise."""
    return lambda ids: torch.tensor(ids, dtype=torch.int64, device=device)


def wait_for_device(found: Pool) -> None:
    """Wait until copies that were queued on a real device have run."""
    if any(each.rows.is_cuda for each in found.buffers):
        torch.cuda.synchronize()


def _check_saved_nothing_else(judge: RowJudge, found: Pool, units: Units, plan: Plan) -> None:
    """Raise NotJudged if save changed rows of others: they are where it keeps values, or it is wrong."""
    for held in found.buffers:
        rows = rows_named([*plan.held, *plan.free], held.unit, units)
        seen, wanted = held.read(rows), judge.ownership.wanted(held, rows)
        if not torch.equal(seen, wanted):
            at = int(torch.nonzero((seen != wanted).any(1))[0])
            owner = judge.ownership.owners[held.unit, rows[at]].request
            raise NotJudged(
                f"save changed {held.unit} {rows[at]} of {held.where}, which request {owner} owns. "
                f"If save keeps values there, or it is scratch memory, pass exclude=({held.name!r},); if it holds KV, "
                "save must not write it"
            )


def _check_keeps_no_copies(judge: RowJudge, found: Pool, units: Units, plan: Plan) -> None:
    """Raise NotJudged if save wrote values to rows of the request that it saved: the next owner's would replace them.

    One value all over is no copy: it is what freed rows are cleared or poisoned with.
    """
    for held in found.buffers:
        rows = rows_named(plan.ids, held.unit, units)
        seen, wanted = held.read(rows), judge.ownership.wanted(held, rows)
        elements = seen.view(len(rows), -1, held.rows.element_size())
        changed = (elements != wanted.view_as(elements)).any(2)
        if len(torch.unique(elements[changed], dim=0)) > 1:
            at = int(torch.nonzero(changed.any(1))[0])
            raise NotJudged(
                f"save wrote values to {held.unit} {rows[at]} of {held.where}, which request {SAVED} owns. "
                f"If save keeps copies in {held.name}, as in a mirror on the host, pass exclude=({held.name!r},); "
                "kvcheck gives these rows to the next request, and the copies would be lost"
            )


def _saved_tensors(copy: object, pool: object, exclude: Collection[str]) -> tuple[Held, ...]:
    """The tensors of a saved value. A tensor of the pool itself, whole, is a way back to the pool and no copy."""
    own = {_place(each.tensor) for each in reached(pool, passed=Passed(exclude)) if is_readable(each.tensor)}
    found = reached(copy, root="copy", but=(pool,))
    return tuple(each for each in found if is_readable(each.tensor) and _place(each.tensor) not in own)


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _judge_saved(
    judge: RowJudge, found: Pool, units: Units, plan: Plan, saved: Sequence[tuple[Held, torch.Tensor]]
) -> tuple[str, ...]:
    """Find saved tensors that are no copies: they share memory with the pool, or changed with their former slots.

    A view that has rows of others too is a way back to the pool. Returns these; load shows whether they are read.
    """
    ways_back: list[str] = []
    for each, before in saved:
        judge.count("saved", len(before), 1)
        now = bytes_of(each.tensor)
        wrong = torch.nonzero(now != before).view(-1)
        shared = {held.key: (held, taken) for held in found.buffers if (taken := rows_in(each.tensor, held))}
        if not shared and not len(wrong):
            continue
        if any(taken & {*rows_named((*plan.held, *plan.free), held.unit, units)} for held, taken in shared.values()):
            ways_back.append(f"{each.path}: a view of rows of others too, which is a way back to the pool and no copy")
            continue
        held, row = None, None
        told = "changed when its slots were given away"
        if shared:
            held, taken = next(iter(shared.values()))
            row = next((row for row in rows_named(plan.ids, held.unit, units) if row in taken), None)
            told = f"shares its memory with {held.where if row is None else f'{held.unit} {row} of {held.where}'}"
        dumps: dict[str, object] = {}
        if len(wrong):
            dumps = {"seen": dump(now, int(wrong[0])), "wanted": dump(before, int(wrong[0]))}
        judge.find(
            "KV305",
            "aliasing",
            f"what save returned for request {SAVED} is no copy: {each.path} {told}, which request {NEXT} owns now",
            held,
            None if not dumps else Wrong("KV305", told, 0, 1, NEXT, dumps),
            row=row,
            request=SAVED,
            seen_request=NEXT,
        )
    return tuple(ways_back)


def _judge_loaded(
    judge: RowJudge, found: Pool, units: Units, plan: Plan, saved: Sequence[tuple[Held, torch.Tensor]]
) -> tuple[str, ...]:
    """Judge the restored rows, and those of everybody else. Returns what could not be judged beside the findings.

    Raises NotJudged if there are no findings, and all rows of a buffer are nobody's, or parts of rows were not touched.
    """
    still: dict[str, str] = {}
    unmoved: dict[str, list[tuple[Buffer, Wrong]]] = {}
    lossy: list[str] = []
    before = {held.key: judge.ownership.wanted(held, rows_named(plan.into, held.unit, units)) for held in found.buffers}
    everybody = [*plan.ids, *plan.held, *plan.free]
    others = [number for number in everybody if number not in set(plan.into)]
    for held in found.buffers:
        _judge_others(judge, held, rows_named(others, held.unit, units))
    give(judge.ownership, found, units, SAVED, plan.into)
    for held in found.buffers:
        rows = rows_named(plan.into, held.unit, units)
        seen, wanted = held.read(rows), judge.ownership.wanted(held, rows)
        wrong = judge.compare(held, rows, seen, wanted)
        if wrong is None:
            continue
        if torch.equal(seen, before[held.key]):
            unmoved.setdefault(held.name, []).append((held, wrong))
        elif wrong.code == "KV105" and wrong.rows == len(rows) and held.dtype.is_floating_point:
            lossy.append(held.where)
            continue
        elif (columns := untouched(held, before[held.key], seen, wanted, [bits for _, bits in saved])) is not None:
            still.setdefault(held.name, _untouched_text(held, columns))
            continue
        judge.find(
            wrong.code,
            "content",
            f"restored after its slots were reused: {held.unit} {rows[wrong.at]} of {held.where}, holds {wrong.story}; "
            f"expected request {SAVED}, position {wrong.at}; {wrong.rows} of {len(rows)} rows are wrong",
            held,
            wrong,
            row=rows[wrong.at],
            request=SAVED,
        )
    for parts in unmoved.values():
        _find_unmoved(judge, parts, rows_named(plan.into, parts[0][0].unit, units))
    if lossy and not judge.findings:
        raise NotJudged(
            f"{lossy[0]}: every restored row holds bytes that nobody wrote, as after a copy to a narrower type. "
            "kvcheck judges copies that keep every bit; exclude the buffer, or compare its values in a test of your own"
        )
    if still and not judge.findings:
        raise NotJudged("; ".join(still.values()))
    return tuple(still.values())


def _untouched_text(held: Buffer, columns: torch.Tensor) -> str:
    index = index_of(held, columns)
    shown = "a part of each row" if index is None else f"{index_text(index)} of each row"
    way = f"exclude=({held.name!r},)" if index is None else f"unused={{{held.name!r}: {index_text(index)}}}"
    return (
        f"{held.where}: save left out {shown}, and load left it as it was, so it is padding or a forgotten part of the "
        f"row. If it holds no KV, pass {way}; if it does, save and load have to move it"
    )


def _find_unmoved(judge: RowJudge, parts: Sequence[tuple[Buffer, Wrong]], rows: Sequence[int]) -> None:
    held, wrong = parts[0]
    layers = [str(each.layer) for each, _ in parts if each.layer is not None]
    where = f"{held.name}, layer{'s' if len(layers) > 1 else ''} {', '.join(layers)}" if layers else held.name
    judge.find(
        "KV304",
        "contract",
        f"request {SAVED} came back without {where}: load left all {len(rows)} rows as they were, {held.unit} "
        f"{rows[wrong.at]} with {wrong.story}; if it holds no KV, pass exclude=({held.name!r},)",
        held,
        wrong,
        row=rows[wrong.at],
        request=SAVED,
    )


def _judge_others(judge: RowJudge, held: Buffer, rows: Sequence[int]) -> None:
    """Find rows of other requests that load changed."""
    wrong = judge.compare(held, rows, held.read(rows), judge.ownership.wanted(held, rows))
    if wrong is not None:
        owner = judge.ownership.owners[held.unit, rows[wrong.at]].request
        judge.find(
            "KV403",
            "lifetime",
            f"load for request {SAVED} changed {held.unit} {rows[wrong.at]} of {held.where}, which request {owner} "
            f"owns: it holds {wrong.story}; rows of others that changed: {wrong.rows}",
            held,
            wrong,
            row=rows[wrong.at],
            request=SAVED,
            seen_request=owner,
        )
