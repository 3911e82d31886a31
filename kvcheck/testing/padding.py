"""Padding: parts of rows that neither save nor load moves, either alignment or forgotten KV.

Invariants:
- A part that the saved value contains is no padding.
- A part that was restored in another layer of the same buffer is KV if other layers agree or the saved value contains
  it twice. So is a part if one of the same size in the same row is saved twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvcheck.testing.buffers import Buffer, index_text
from kvcheck.testing.failures import NotJudged
from kvcheck.testing.judge import RowJudge, WrongRow

__tracebackhide__ = True

TELLING = 4
"""Bytes that suffice for a match; shorter runs are matched as part of the whole row."""


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Whole rows of a request in one layer, [rows, bytes] each: before load, after load, and as saved."""

    before: torch.Tensor
    seen: torch.Tensor
    wanted: torch.Tensor

    def came_back(self, columns: torch.Tensor) -> bool:
        seen, wanted = self.seen[:, columns], self.wanted[:, columns]
        return torch.equal(seen, wanted) and not torch.equal(seen, self.before[:, columns])


@dataclass(frozen=True, slots=True)
class Left:
    """A part of a layer's rows that load left unchanged. columns: [elements of a row] bool."""

    held: Buffer
    columns: torch.Tensor
    wrong: WrongRow | None
    """First wrong row; None for a part that unused= names."""

    @property
    def bytes(self) -> torch.Tensor:
        return self.columns.repeat_interleave(self.held.rows.element_size())


def untouched(
    held: Buffer, before: torch.Tensor, seen: torch.Tensor, wanted: torch.Tensor, saved: Sequence[torch.Tensor]
) -> torch.Tensor | None:
    """Return the elements of a row that neither save nor load moved, if they contain all wrong bytes; else None.

    before, seen, wanted: [rows, bytes]. Returns [elements of a whole row] bool.
    """
    wrong = seen != wanted
    columns = wrong.any(0)
    if bool(columns.all()) or not torch.equal(seen[:, columns], before[:, columns]):
        return None
    columns = columns.view(-1, held.rows.element_size()).any(1)
    if bool(columns.all()):
        return None
    bits = columns.repeat_interleave(held.rows.element_size())
    kept = [bytes(each.tolist()) for each in saved]
    runs = [(start, end) for start, end in _runs(bits.tolist()) if end - start >= TELLING] or [(0, len(bits))]
    for row in wanted:
        if not any(bytes(row[start:end].tolist()) in each for start, end in runs for each in kept):
            return _of_whole_row(held, columns)
    return None


def named_and_left(held: Buffer, rows: LayerRows) -> Left | None:
    if held.used is None:
        return None
    columns = torch.ones(held.width // held.rows.element_size(), dtype=torch.bool)
    columns[held.used.cpu()] = False
    left = Left(held, columns, None)
    return left if torch.equal(rows.seen[:, left.bytes], rows.before[:, left.bytes]) else None


def judge_left(
    judge: RowJudge,
    found: Sequence[Left],
    layers: Mapping[tuple[str, int | None], tuple[Buffer, LayerRows]],
    saved: Sequence[torch.Tensor],
    request: int,
) -> list[str]:
    """Add findings for parts that were restored in another layer. Returns notes on the others. Raises NotJudged if
    unused= names a restored part."""
    told: list[str] = []
    families: dict[tuple[object, ...], list[Left]] = {}
    for left in found:
        families.setdefault((left.held.family, left.held.width, bytes(left.columns.tolist())), []).append(left)
    for parts in families.values():
        first = parts[0].held
        keys = {each.held.key for each in parts}
        moved = [
            (held, rows)
            for held, rows in layers.values()
            if (held.family, held.width) == (first.family, first.width)
            and held.key not in keys
            and rows.came_back(parts[0].bytes)
        ]
        if not moved:
            if any(_is_shared_in_row(each, layers[each.held.key][1], saved) for each in parts):
                _find(judge, parts, None, request, is_read_twice=True)
            elif parts[0].wrong is not None:
                is_all = all(held.key in keys for held, _ in layers.values() if held.family == first.family)
                told.append(_text(parts, None, is_all=is_all))
            continue
        is_named = all(each.wrong is None for each in parts)
        is_read_twice = any(_is_read_twice(rows.wanted, parts[0].bytes, saved) for _, rows in moved)
        is_one_side = _is_one_side([each.held for each in parts], [held for held, _ in moved])
        if is_read_twice or (len(moved) > 1 and not (is_named or is_one_side)):
            _find(judge, parts, moved[0][0], request, is_read_twice)
        elif not is_named:
            told.append(_text(parts, moved[0][0]))
        elif not is_one_side or any(held.used is not None for held, _ in moved):
            raise NotJudged(
                f"unused= names {_index(parts[0])} of {_names(parts)}, and the same part of {moved[0][0].path} came "
                "back: load moves it there, so it is KV. Name the side of keys or values that has none, such as "
                "'kv[*, 1]'; where layers differ, pass views of what each of them holds as the pool"
            )
    return told


def _find(judge: RowJudge, parts: Sequence[Left], other: Buffer | None, request: int, is_read_twice: bool) -> None:
    """other: a layer in which the part was restored; None if one of the same size was restored in the same rows."""
    held, wrong = parts[0].held, parts[0].wrong
    same = f"the same part of {other.path} came back" if other else "a part of the same size came back beside it"
    why = f"; the saved value has that {'' if other is None else f'of {other.path} '}more than once"
    judge.find(
        "KV304",
        "contract",
        f"request {request} came back without {_index(parts[0])} of each row of {_names(parts)}: save left it out and "
        f"load left it as it was, and {same}{why if is_read_twice else ''}. A layer that has no such part is "
        "passed as a view of what it holds",
        held,
        wrong,
        request=request,
    )


def _text(parts: Sequence[Left], other: Buffer | None, *, is_all: bool = False) -> str:
    held = parts[0].held
    index = index_of(held, parts[0].columns)
    if other is not None:
        way = f"The same part of {other.path} came back. If only that one holds KV there, pass views of what each holds"
    elif index is None or _has_more(held, index):
        way = (
            "If it holds no KV, pass views of what the rows hold as the pool; if it does, save and load have to move it"
        )
    else:
        names = [held.family] if is_all and held.family else [each.held.path for each in parts]
        unused = ", ".join(f"{name!r}: {index_text(index)}" for name in names)
        way = f"If it holds no KV, pass unused={{{unused}}}; if it does, save and load have to move it"
    return (
        f"{_names(parts)}: save left out {_index(parts[0])} of each row, and load left it as it was, so it is padding "
        f"or a forgotten part of the row. {way}"
    )


def _has_more(held: Buffer, index: tuple[slice, ...] | slice) -> bool:
    outer = zip(index[:-1], held.dims, strict=False) if isinstance(index, tuple) else ()
    return any(side != slice(0, size) for side, size in outer)


def _names(parts: Sequence[Left]) -> str:
    return ", ".join(each.held.path for each in parts)


def _index(left: Left) -> str:
    index = index_of(left.held, left.columns)
    return "a part" if index is None else index_text(index)


def _is_one_side(left: Sequence[Buffer], moved: Sequence[Buffer]) -> bool:
    """Whether the part is one of two halves of a tensor: keys and values may differ in width."""
    own = min(each.own for each in (*left, *moved))
    for axis in range(-own, 0):
        sides = [{each.numbers[axis] for each in some} for some in (left, moved)]
        if all(len(side) == 1 for side in sides) and sides[0] | sides[1] == {0, 1}:
            return True
    return False


def _is_read_twice(wanted: torch.Tensor, part: torch.Tensor, saved: Sequence[torch.Tensor]) -> bool:
    kept = [bytes(each.tolist()) for each in saved]
    return _times(wanted, part, kept) > _times(wanted, ~part, kept) > 0


def _is_shared_in_row(left: Left, rows: LayerRows, saved: Sequence[torch.Tensor]) -> bool:
    """Whether another part of the row, as long as `left`'s longest run, is saved more often than its neighbours."""
    start, end = max(_runs(left.bytes.tolist()), key=lambda run: run[1] - run[0])
    size, step = end - start, left.held.rows.element_size()
    kept = [bytes(each.tolist()) for each in saved]
    is_back = ((rows.seen == rows.wanted).all(0) & ~left.bytes).tolist()
    some = rows.wanted[:1] if size >= TELLING else rows.wanted
    counts = {
        at: times_saved(some[:, at : at + size], kept)
        for at in range(0, len(is_back) - size + 1, step)
        if all(is_back[at : at + size])
    }
    once = min((count for count in counts.values() if count), default=0)
    often = {at for at, count in counts.items() if count > once}
    return any(not {at - step, at + step} & often for at in often)


def _times(wanted: torch.Tensor, part: torch.Tensor, kept: Sequence[bytes]) -> int:
    start, end = max(_runs(part.tolist()), key=lambda run: run[1] - run[0])
    needles = [wanted[:, part], wanted[0, part], wanted[0, start:end]]
    return next((count for needle in needles if (count := times_saved(needle, kept))), 0)


def times_saved(needle: torch.Tensor, kept: Sequence[bytes]) -> int:
    """Count these bytes in the saved value. Fewer than TELLING bytes count only as a whole tensor."""
    bits = bytes(needle.reshape(-1).tolist())
    return sum(each.count(bits) if len(bits) >= TELLING else each == bits for each in kept)


def index_of(held: Buffer, columns: torch.Tensor) -> tuple[slice, ...] | slice | None:
    """Return these elements as an index of a row; None if they form no box."""
    if held.dtype.is_complex or len(columns) != math.prod(held.dims):
        return None
    box = columns.reshape(held.dims)
    sides = []
    for at, size in enumerate(held.dims):
        hit = torch.nonzero(box.movedim(at, 0).reshape(size, -1).any(1)).view(-1)
        sides.append(slice(int(hit[0]), int(hit[-1]) + 1))
    if not bool(box[tuple(sides)].all()):
        return None
    return sides[0] if len(sides) == 1 else tuple(sides)


def _of_whole_row(held: Buffer, columns: torch.Tensor) -> torch.Tensor:
    if held.used is None:
        return columns
    whole = torch.zeros(held.width // held.rows.element_size(), dtype=torch.bool)
    whole[held.used.cpu()] = columns
    return whole


def _runs(flags: Sequence[bool]) -> list[tuple[int, int]]:
    edges = [at for at in range(len(flags) + 1) if (at < len(flags) and flags[at]) != (at > 0 and flags[at - 1])]
    return list(zip(edges[::2], edges[1::2], strict=True))
