"""Plan: the requests of a trial and the slots of each, as whole pages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

from kvcheck.core.base.record import Evidence
from kvcheck.core.base.rng import Rng
from kvcheck.testing.buffers import Buffer, Pool, RowUnits
from kvcheck.testing.failures import IntegrityError, Judged, NotJudged
from kvcheck.testing.judge import PADDING, Ownership, RowJudge, WrongRow

__tracebackhide__ = True

SAVED, BYSTANDER, NEXT, SAVED_LATE = 1, 2, 3, 4
MOST_PAGES = 4
"""Most pages of a drawn request; the least is two."""
MOST_LISTED = 12
"""Most ids and ranges of ids in a text."""
_CURRENT: ContextVar[Trial | None] = ContextVar("kvcheck trial", default=None)


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """Slots. ids, into: of the saved request, before and after. held: of the bystander. free: the rest but padding."""

    ids: tuple[int, ...]
    into: tuple[int, ...]
    held: tuple[int, ...]
    free: tuple[int, ...]
    padding: tuple[int, ...]


def plan_of(
    units: RowUnits, ids: Sequence[int] | None, into: Sequence[int] | None, padding: Collection[int], seed: int
) -> SlotPlan:
    """Draw whole pages for requests without given ones. Drawn `ids` and `into` share a page with a chance of 1 in 2."""
    mix = Rng(seed)
    padded = {(number + units.slots if number < 0 else number) // units.page_size for number in padding}
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
    padding = sorted(page for page in padded if 0 <= page < units.pages)
    return SlotPlan(*(_tokens(pages, units) for pages in (first, second, held, free, padding)))


def _pages_of(name: str, ids: Sequence[int], units: RowUnits, padded: Collection[int]) -> list[int]:
    given = [int(number) for number in ids]
    pages = [number // units.page_size for number in given[:: units.page_size]]
    if not given or list(_tokens(pages, units)) != given or len(set(pages)) != len(pages):
        raise NotJudged(f"{name}={given}: expected slots that are whole pages of {units.page_size} in order, each once")
    if odd := [page for page in pages if page in padded or not 0 <= page < units.pages]:
        raise NotJudged(f"{name}={given}: page or slot {odd[0]} is padding, or none of {units}; see padding=")
    return pages


def _tokens(pages: Sequence[int], units: RowUnits) -> tuple[int, ...]:
    size = units.page_size
    return tuple(page * size + offset for page in pages for offset in range(size))


def ids_text(ids: Sequence[int]) -> str:
    """Return a list in Python, with consecutive ids as *range(start, end)."""
    starts = [at for at, number in enumerate(ids) if not at or number != ids[at - 1] + 1]
    parts = [ids[start:end] for start, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    listed = [f"*range({part[0]}, {part[-1] + 1})" if len(part) > 2 else ", ".join(map(str, part)) for part in parts]
    more = f", ... {len(ids)} ids" if len(listed) > MOST_LISTED else ""
    return f"[{', '.join(listed[:MOST_LISTED])}{more}]"


@dataclass(slots=True)
class SlotScene:
    """The slots of one call. make: the argument of save and load from a list of slots. look: searches the buffers."""

    units: RowUnits
    plan: SlotPlan
    make: Callable[[list[int]], object]
    look: Callable[[], Pool]
    found: Pool
    judge: RowJudge

    def rows(self, held: Buffer, ids: Sequence[int]) -> list[int]:
        return self._rows(held.unit, ids)

    def wanted(self, held: Buffer, ids: Sequence[int]) -> torch.Tensor:
        return self.judge.ownership.wanted(held, self.rows(held, ids))

    def compare(self, held: Buffer, ids: Sequence[int]) -> WrongRow | None:
        return self.judge.compare(held, self.rows(held, ids), held.read(self.rows(held, ids)), self.wanted(held, ids))

    def ids(self) -> object:
        return self.make(list(self.plan.ids))

    def into(self) -> object:
        return self.make(list(self.plan.into))

    def mark(self, request: int, ids: Sequence[int]) -> None:
        for unit in dict.fromkeys(each.unit for each in self.found.buffers):
            self.judge.ownership.write(self.found.buffers, unit, request, self._rows(unit, ids))

    def mark_all(self, saved: int = SAVED) -> None:
        plan = self.plan
        owners = ((PADDING, plan.padding), (saved, plan.ids), (BYSTANDER, plan.held), (NEXT, plan.free))
        for request, owned in owners:
            self.mark(request, owned)

    def give(self, request: int, ids: Sequence[int]) -> None:
        for unit in dict.fromkeys(each.unit for each in self.found.buffers):
            self.judge.ownership.give(unit, request, self._rows(unit, ids))

    def look_again(self) -> None:
        """Search the buffers again after load. Raises NotJudged if they differ."""
        again = self.look()
        if [each.key for each in again.buffers] != [each.key for each in self.found.buffers]:
            raise NotJudged(
                "load replaced tensors of the pool by others of another shape or name, which have no known content"
            )
        self.found, self.judge.buffers = again, again.buffers
        self.wait_for_device()

    def wait_for_device(self) -> None:
        if any(each.rows.is_cuda for each in self.found.buffers):
            torch.cuda.synchronize()

    def _rows(self, unit: str, ids: Sequence[int]) -> list[int]:
        size = self.units.page_size
        return [number // size for number in ids[::size]] if unit == "page" and size > 1 else list(ids)


def scene_of(
    look: Callable[[], Pool],
    units: RowUnits,
    ids: Sequence[int] | None,
    into: Sequence[int] | None,
    padding: Collection[int],
    as_ids: Callable[[list[int]], object] | None,
    seed: int,
) -> SlotScene:
    found = look()
    device = found.buffers[0].rows.device
    plan = plan_of(units, ids, into, padding, seed)
    return SlotScene(
        units=units,
        plan=plan,
        make=as_ids or (lambda numbers: torch.tensor(numbers, dtype=torch.int64, device=device)),
        look=look,
        found=found,
        judge=RowJudge(Ownership(), found.buffers, calls=[f"save({ids_text(plan.ids)})"]),
    )


@dataclass(slots=True)
class Trial:
    seed: int = 0
    judged: list[Judged] = field(default_factory=list)

    def evidence(self) -> Evidence:
        total = Evidence(schedules=1)
        for each in self.judged:
            orderings = each.orderings or None
            total = total.plus(
                Evidence(events=each.reads, words_verified=dict(each.words), orderings_checked=orderings)
            )
        return total


@contextmanager
def trial(seed: int) -> Iterator[Trial]:
    """Give calls of kvcheck.testing in this block this seed, and keep their results."""
    made = Trial(seed)
    token = _CURRENT.set(made)
    try:
        yield made
    finally:
        _CURRENT.reset(token)


def seed_of(asked: int | None) -> int:
    current = _CURRENT.get()
    return asked if asked is not None else current.seed if current is not None else 0


def conclude(judged: Judged) -> Judged:
    """Add the result to the trial and return it. Raises IntegrityError if it has findings."""
    current = _CURRENT.get()
    if current is not None:
        current.judged.append(judged)
    if judged.findings:
        raise IntegrityError(judged)
    return judged
