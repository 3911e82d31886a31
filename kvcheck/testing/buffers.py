"""Buffers: tensors of the user's object with a dimension of slots or pages, read and written row by row.

Invariants:
- Buffers are found, not listed: a list would have the same omissions as the code under test.
- A tensor of two or more dimensions without slots or pages is NotJudged, unless its memory belongs to judged tensors.
- Memory with several names is one buffer. If that hides a tensor, `not_tried` names it.
- A name that a message recommends, such as "arena[1, 0]", is valid in `exclude` and `unused`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvcheck.core.base.nouns import plural
from kvcheck.testing.failures import NotJudged
from kvcheck.testing.reached import (
    BITS,
    ByteMap,
    HeldTensor,
    Passed,
    has_part,
    is_named,
    is_readable,
    reached,
    rows_touched,
)

__tracebackhide__ = True

IDS = (torch.int16, torch.int32, torch.int64, torch.bool)
"""Types in which one element a slot is an id, a length or a flag, not content."""
LISTED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUnits:
    slots: int
    page_size: int = 1
    unit: str | None = None

    def __post_init__(self) -> None:
        for name, value in (("slots", self.slots), ("page_size", self.page_size)):
            if not isinstance(value, int):
                raise NotJudged(f"expected {name}= as a whole number, got {value!r}")
        if self.slots < 2 or self.page_size < 1 or self.slots % self.page_size:
            raise NotJudged(
                f"expected slots= as a multiple of page_size= and at least 2, got {self.slots} and {self.page_size}"
            )
        if self.unit == "page" and self.page_size > 1:
            raise NotJudged(f"unit='page': expected page_size=1, since an id numbers a page; got {self.page_size}")

    @property
    def name(self) -> str:
        """Noun of what an id numbers."""
        return self.unit or ("token" if self.page_size > 1 else "row")

    @property
    def pages(self) -> int:
        return self.slots // self.page_size

    def __str__(self) -> str:
        return f"{self.slots} slots" + (f" or {self.pages} pages" if self.page_size > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """One layer of a buffer. rows: bits of the tensor, [rows, ...] or [pages, tokens, ...]. unit: the unit of a row.

    family: the name that its layers share. numbers: its indices, of which the last `own` index the tensor itself.
    split: tokens per page if `rows` has both dimensions, else 0. used: numbers of the row's elements that hold KV, None
    for all; the others are written but not compared.
    """

    name: str
    layer: int | None
    paths: tuple[str, ...]
    family: str
    numbers: tuple[int, ...]
    own: int
    unit: str
    rows: torch.Tensor
    dtype: torch.dtype
    split: int = 0
    used: torch.Tensor | None = None

    @property
    def units(self) -> str:
        return plural(2, self.unit)

    @property
    def where(self) -> str:
        return self.name if self.layer is None else f"{self.name}, layer {self.layer}"

    @property
    def key(self) -> tuple[str, int | None]:
        return self.name, self.layer

    @property
    def path(self) -> str:
        return self.paths[0]

    @property
    def width(self) -> int:
        return math.prod(self.dims) * self.rows.element_size()

    @property
    def size(self) -> int:
        return self.width if self.used is None else len(self.used) * self.rows.element_size()

    @property
    def whole(self) -> Buffer:
        return replace(self, used=None)

    def kept(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the KV bytes of whole rows: [rows, width] -> [rows, size]."""
        if self.used is None:
            return rows
        return rows.view(len(rows), -1, self.rows.element_size())[:, self.used.cpu()].reshape(len(rows), self.size)

    def read(self, ids: Sequence[int]) -> torch.Tensor:
        """Return host copies of rows: [ids, size] uint8."""
        return self.gathered(self.index(ids)).cpu()

    def gathered(self, at: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return copies of rows on the buffer's device, [ids, size] uint8, without a wait of the process."""
        count = len(at[0])
        if not count:
            return torch.zeros(0, self.size, dtype=torch.uint8)
        found = self.rows[at].reshape(count, math.prod(self.dims))
        kept = found if self.used is None else found[:, self.used]
        return kept.contiguous().view(-1).view(torch.uint8).reshape(count, self.size)

    def write(self, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write whole rows: [ids, width] uint8."""
        if len(ids):
            bits = rows.contiguous().view(-1).view(self.rows.dtype).to(self.rows.device)
            self.rows[self.index(ids)] = bits.reshape(len(ids), *self.dims)

    def rows_in(self, tensor: torch.Tensor) -> frozenset[int]:
        return rows_touched(tensor, self.rows, 2 if self.split else 1)

    def row(self, number: int) -> torch.Tensor:
        return self.rows[divmod(number, self.split)] if self.split else self.rows[number]

    @property
    def dims(self) -> tuple[int, ...]:
        return tuple(self.rows.shape[2:] if self.split else self.rows.shape[1:])

    def index(self, ids: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return the index of rows into `rows`. Its copy to a device makes the process wait."""
        at = torch.tensor(list(ids), dtype=torch.int64, device=self.rows.device)
        return (at // self.split, at % self.split) if self.split else (at,)


@dataclass(frozen=True, slots=True)
class RowTensor:
    """A tensor with rows. at: their dimension. tokens: that of a page's tokens, if any. is_page: a row is a page."""

    held: HeldTensor
    at: int
    tokens: int | None
    is_page: bool


@dataclass(frozen=True, slots=True)
class Pool:
    """Buffers of an object. threads: paths of threads that cannot be held. within: (part, whole) tensors."""

    buffers: tuple[Buffer, ...]
    not_tried: tuple[str, ...]
    threads: tuple[str, ...]
    reached: tuple[HeldTensor, ...]
    within: tuple[tuple[RowTensor, RowTensor], ...]


def find_buffers(
    thing: object,
    units: RowUnits,
    *,
    exclude: Collection[str] = (),
    include: Collection[str] = (),
    unused: Mapping[str, object] | None = None,
) -> Pool:
    """Return the buffers of an object. Raises NotJudged if a tensor or a name does not fit."""
    passed = Passed(() if isinstance(exclude, str) else exclude)
    every = reached(thing, passed=passed)
    unused = unused or {}
    _check_names(every, units, exclude, "exclude", passed.paths)
    _check_names(every, units, include, "include")
    _check_names(every, units, tuple(unused), "unused")
    left = [f"{path}: excluded by name" for path in passed.paths]
    matched: list[RowTensor] = []
    odd: list[HeldTensor] = []
    flat: list[HeldTensor] = []
    for held in every:
        if held.is_named(exclude):
            left.append(f"{held.path}: excluded by name")
            continue
        if not held.tensor.numel():
            continue
        _check_kind(held)
        match = _match(held, units)
        if match is not None and not (_is_id_list(held) and not held.is_named(include)):
            _check_rows(held)
            matched.append(match)
        elif match is not None:
            left.append(f"{held.path}: one {_kind(held)} a slot is an id or a flag; include={held.path!r} judges it")
        elif held.tensor.dim() < 2:
            left.append(f"{held.path}: no dimension of {units}")
            flat.append(held)
        else:
            odd.append(held)
    kept, shared, within = _each_byte_once(matched, odd, units)
    shared = (*shared, *_across([*odd, *flat], kept))
    parts = [part for each in kept for part in _parts(each, units, unused)]
    left += [f"{each.path}: excluded by name" for each in parts if _is_any(each.paths, exclude)]
    parts = [each for each in parts if not _is_any(each.paths, exclude)]
    if not parts:
        shapes = ", ".join(f"{each.path} {list(each.tensor.shape)}" for each in every[:LISTED]) or (
            "nothing but what is excluded" if passed.paths else "no tensor at all"
        )
        raise NotJudged(
            f"no tensor below {type(thing).__name__} has a dimension of {units}; found {shapes}. Pass the number of "
            "rows of the pool's tensors as slots="
        )
    left += [f"{name}: {index_text(index)} of its rows, named in unused=" for name, index in unused.items()]
    return Pool(
        tuple(parts), (*left, *shared, *_reached_again(kept, passed.again)), tuple(passed.threads), every, within
    )


def index_text(index: object) -> str:
    if isinstance(index, tuple):
        return f"({', '.join(map(index_text, index))}{',' if len(index) == 1 else ''})"
    if isinstance(index, slice) and index.step is None:
        return f"slice({index.start}, {index.stop})"
    return "..." if index is Ellipsis else repr(index)


def _check_names(
    every: Sequence[HeldTensor], units: RowUnits, names: Collection[str], option: str, paths: Sequence[str] = ()
) -> None:
    layers = [path for held in every for index in _indices(held, units) for path in _layer_paths(held.path, index)]
    for name in [names] if isinstance(names, str) else names:
        is_met = any(held.is_named((name,)) for held in every) or _is_any((*paths, *layers), (name,))
        if isinstance(names, str) or not is_met:
            known = ", ".join(dict.fromkeys(held.stem for held in every)) or "none"
            what = "a tuple of names" if isinstance(names, str) else "names of tensors"
            raise NotJudged(f"{option}={names!r}: expected {what}; the pool has {known}")


def _indices(held: HeldTensor, units: RowUnits) -> list[tuple[int, ...]]:
    sizes = held.tensor.shape
    at = next((at for at, size in enumerate(sizes) if size in (units.slots, units.pages)), 0)
    return [*itertools.product(*(range(size) for size in sizes[:at]))] if at else []


def _layer_paths(path: str, index: Sequence[int]) -> tuple[str, ...]:
    """The second name, "arena[1][0]", is for patterns such as "arena[1]"."""
    if not index:
        return (path,)
    return f"{path}[{', '.join(map(str, index))}]", path + "".join(f"[{number}]" for number in index)


def _check_kind(held: HeldTensor) -> None:
    if held.tensor.is_conj() or held.tensor.is_neg():
        raise NotJudged(
            f"{held.path} is a view whose bytes are not its values (conjugated or negated). Keep the tensor that it is "
            f"made of, or pass exclude=({held.path!r},)"
        )
    if not is_readable(held.tensor):
        raise NotJudged(
            f"{held.path} is {_kind(held)} on {held.tensor.device}, whose bytes kvcheck cannot read. If it holds no "
            f"KV, pass exclude=({held.path!r},)"
        )


def _check_rows(held: HeldTensor) -> None:
    sizes = zip(held.tensor.shape, held.tensor.stride(), strict=True)
    if any(size > 1 and stride == 0 for size, stride in sizes):
        raise NotJudged(f"{held.path} is expanded: its rows share memory. Pass exclude=({held.path!r},)")


def _kind(held: HeldTensor) -> str:
    layout = "" if held.tensor.layout == torch.strided else f"{held.tensor.layout} of "
    return f"{layout}{held.tensor.dtype}".replace("torch.", "")


def _is_id_list(held: HeldTensor) -> bool:
    return held.tensor.dim() == 1 and held.tensor.dtype in IDS


def _match(held: HeldTensor, units: RowUnits) -> RowTensor | None:
    shape = held.tensor.shape
    by_slot = [at for at, size in enumerate(shape) if size == units.slots]
    by_page = [at for at, size in enumerate(shape) if size == units.pages] if units.page_size > 1 else []
    if len(by_slot) + len(by_page) > 1:
        raise NotJudged(
            f"{held.path} {list(shape)} has more than one dimension of {units}. Build the pool with a number of slots "
            "that no other dimension has, such as 61, or 61 pages"
        )
    if by_slot:
        return RowTensor(held, by_slot[0], None, False)
    if not by_page:
        return None
    tokens = next((at for at in range(by_page[0] + 1, len(shape)) if shape[at] == units.page_size), None)
    return RowTensor(held, by_page[0], tokens, tokens is None)


def _each_byte_once(
    matched: Sequence[RowTensor], odd: Sequence[HeldTensor], units: RowUnits
) -> tuple[list[RowTensor], tuple[str, ...], tuple[tuple[RowTensor, RowTensor], ...]]:
    """Return tensors that cover all buffer memory once; texts on hidden ones; and (part, whole) pairs.

    Disjoint parts of a larger tensor hide nothing, such as layers of an arena or scales in rows of bytes. A tensor is
    hidden if it equals another one, crosses several, or is the only part of another.
    """
    taken = ByteMap([each.held.tensor for each in matched] + [held.tensor for held in odd])
    kept: list[int] = []
    shared: dict[tuple[str, str], list[HeldTensor]] = {}
    parts: dict[int, list[RowTensor]] = {}
    sizes = [each.held.tensor.numel() * each.held.tensor.element_size() for each in matched]
    for at in sorted(range(len(matched)), key=lambda at: -sizes[at]):
        held = matched[at].held
        numbers = taken.of(held.tensor)
        found = torch.unique(numbers).tolist()
        others = [matched[number - 1].held for number in sorted(found, key=lambda number: sizes[number - 1]) if number]
        if others and 0 in found:
            raise NotJudged(
                f"{held.path} shares a part of its memory with {others[0].path}, so a row of one is written where "
                f"somebody's row of the other lies. If one of them holds no KV, leave it out: exclude=({held.path!r},)"
            )
        if not others:
            kept.append(at)
        elif len(others) > 1 or sizes[found[0] - 1] == sizes[at]:
            shared.setdefault((held.stem, others[0].stem), []).extend((held, others[0]))
            if len(others) > 1:
                parts.setdefault(max(found, key=lambda number: sizes[number - 1]) - 1, []).append(matched[at])
            continue
        else:
            parts.setdefault(found[0] - 1, []).append(matched[at])
        numbers.fill_(at + 1)
    for held in odd:
        if not bool(taken.of(held.tensor).all()):
            raise NotJudged(
                f"{held.path} {list(held.tensor.shape)} has no dimension of {units}, so nothing says which of its rows "
                f"are a request's. If it holds no KV, pass exclude=({held.path!r},); if it has a row a page, pass "
                "page_size="
            )
    within: list[tuple[RowTensor, RowTensor]] = []
    for at, inside in parts.items():
        part, whole = inside[0].held, matched[at].held
        is_typed = part.tensor.dtype != whole.tensor.dtype and whole.tensor.element_size() == 1
        if len(inside) > 1 or is_typed:
            within += [(each, matched[at]) for each in inside]
        else:
            shared.setdefault((part.stem, whole.stem), []).extend((part, whole))
    return [matched[at] for at in sorted(kept)], tuple(map(shared_text, shared.values())), tuple(within)


def _across(others: Sequence[HeldTensor], kept: Sequence[RowTensor]) -> tuple[str, ...]:
    pairs = [(held, each.held) for held in others for each in kept if has_part(held.tensor, each.held.tensor)]
    return tuple(map(shared_text, pairs))


def _reached_again(kept: Sequence[RowTensor], again: Sequence[HeldTensor]) -> tuple[str, ...]:
    shared: dict[tuple[str, str], list[HeldTensor]] = {}
    for held in again:
        first = next((each.held for each in kept if each.held.tensor is held.tensor), None)
        if first is None:
            continue
        is_beside = held.path.rpartition(".")[0] == first.path.rpartition(".")[0]
        if is_beside or held.stem == first.stem:
            shared.setdefault((held.stem, first.stem), []).extend((held, first))
    return tuple(map(shared_text, shared.values()))


def shared_text(pairs: Sequence[HeldTensor]) -> str:
    hidden, first = pairs[::2], pairs[1]
    other = hidden[0].tensor.dtype
    kind = (
        "" if other == first.tensor.dtype else f" as {other} where that is {first.tensor.dtype}".replace("torch.", "")
    )
    return (
        f"{paths_text(hidden)}: shares memory with {paths_text(pairs[1::2])}{kind}, and was written and compared as "
        "that alone; if both hold KV, each overwrites the other: watch() a value of one while the other is written"
    )


def paths_text(some: Sequence[HeldTensor]) -> str:
    paths = [*dict.fromkeys(held.path for held in some)]
    return ", ".join(paths[:LISTED]) + (", ..." if len(paths) > LISTED else "")


def layers_of(match: RowTensor, units: RowUnits) -> tuple[Buffer, ...]:
    return tuple(_parts(match, units, {}))


def _is_any(paths: Iterable[str], names: Collection[str]) -> bool:
    return any(is_named(path, path, names) for path in paths)


def _used(
    held: HeldTensor, paths: Sequence[str], dims: Sequence[int], unused: Mapping[str, object]
) -> torch.Tensor | None:
    named = [index for name, index in unused.items() if held.is_named((name,)) or _is_any(paths, (name,))]
    if not named:
        return None
    mask = torch.ones(*dims, dtype=torch.bool)
    for index in named:
        try:
            mask[index] = False  # type: ignore[index]
        except (IndexError, TypeError) as error:
            raise NotJudged(
                f"unused={{{held.stem!r}: {index_text(index)}}} is no index of a row of {held.path}, "
                f"{list(dims)}: {error}"
            ) from error
    if held.tensor.is_complex():
        mask = mask.unsqueeze(-1).expand(*dims, 2)
    if not bool(mask.any()):
        raise NotJudged(f"unused= leaves nothing of {held.path}; to leave out all of it, pass exclude=({held.stem!r},)")
    return torch.nonzero(mask.reshape(-1)).view(-1).to(held.tensor.device)


def _parts(match: RowTensor, units: RowUnits, unused: Mapping[str, object]) -> Iterator[Buffer]:
    held, tensor = match.held, match.held.tensor.detach()
    dims = [size for at, size in enumerate(tensor.shape) if at > match.at and at != match.tokens]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(BITS[tensor.element_size()])
    for index in itertools.product(*(range(size) for size in tensor.shape[: match.at])):
        part = bits[index]
        if match.tokens is not None:
            part = part.movedim(match.tokens - match.at, 1)
        numbers = (*held.keys, *index)
        is_lone = len(numbers) == 1
        paths = _layer_paths(held.path, index)
        yield Buffer(
            name=held.stem if is_lone else paths[0],
            layer=numbers[0] if is_lone else None,
            paths=paths,
            family=held.stem,
            numbers=numbers,
            own=len(index),
            unit="page" if match.is_page else units.name,
            rows=part,
            dtype=held.tensor.dtype,
            split=0 if match.tokens is None else units.page_size,
            used=_used(held, paths, dims, unused),
        )
