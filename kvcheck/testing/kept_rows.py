"""Kept rows: the row in which a pool keeps an id, learned by a save and a load of that id alone.

Invariants:
- Save and load agree on a row for each id, another for each, not its own for all. If they raise, findings stay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcheck.testing.failures import NotJudged
from kvcheck.testing.judge import TELLING
from kvcheck.testing.late_saves import saved_once
from kvcheck.testing.plan import SAVED, SlotScene

__tracebackhide__ = True


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
