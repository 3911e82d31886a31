"""Misuse of offloaded values: those that do not fit the pool or the holding, are dropped, or are still being copied.

Invariants:
- Each misfit differs from the saved value, or from the holding that it fits, in one thing.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcheck.core.base.errors import (
    DoubleFree,
    ForeignAccess,
    FreeInFlight,
    KvcheckError,
    LayoutMismatch,
    LengthMismatch,
)
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import Scene, ids, varied


def _saving(**changes: Callable[[Scene], object]) -> Callable[[Scene], object]:
    """Save a holding that differs from the saved one in these fields."""
    return lambda scene: scene.offload.save(varied(scene.one, **{name: of(scene) for name, of in changes.items()}))


def _save_holes(scene: Scene) -> object:
    """Window pages that are gone between others that are not."""
    if not scene.pool.has_window:
        return NOT_NOW
    first = int(scene.one.window_pages[0])
    return scene.offload.save(varied(scene.one, window_pages=ids(first, 0)))


def _save_all(scene: Scene) -> bool:
    """Every token that the pages hold can be saved, and the value dropped."""
    scene.offload.discard(scene.offload.save(varied(scene.one, committed=2 * scene.page)))
    return True


def _restoring(**changes: Callable[[Scene], object]) -> Callable[[Scene], object]:
    """Restore a value that differs from the saved one in these fields."""
    return lambda scene: scene.offload.restore(
        varied(scene.saved, **{name: of(scene) for name, of in changes.items()}), scene.one
    )


def _into(**changes: Callable[[Scene], object]) -> Callable[[Scene], object]:
    """Restore the value into a holding that differs from the request's own in these fields."""
    return lambda scene: scene.offload.restore(
        scene.saved, varied(scene.one, **{name: of(scene) for name, of in changes.items()})
    )


def _into_gone(scene: Scene) -> object:
    """A holding whose first window page is gone."""
    if not scene.pool.has_window:
        return NOT_NOW
    return scene.offload.restore(scene.saved, varied(scene.one, window_pages=ids(0, int(scene.one.window_pages[1]))))


def _reordered(scene: Scene) -> object:
    """A value whose buffers come in another order."""
    first, *rest = scene.saved.buffers
    return scene.offload.restore(varied(scene.saved, buffers=(*rest, first)), scene.one) if rest else NOT_NOW


def _row_less(scene: Scene) -> object:
    """A value one of whose buffers has lost its last row."""
    short = [varied(each, words=each.words[:, :-1]) for each in scene.saved.buffers[-1:]]
    return scene.offload.restore(varied(scene.saved, buffers=(*scene.saved.buffers[:-1], *short)), scene.one)


def _restored(scene: Scene) -> bool:
    """A value goes back to where it was saved from."""
    value = scene.offload.save(scene.one)
    scene.offload.restore(value, scene.one)
    scene.offload.discard(value)
    return True


def _pending(scene: Scene, call: Callable[[Scene], object]) -> object:
    """Make the call while no copy is known to be done."""
    scene.backend.is_pending = True
    try:
        return call(scene)
    finally:
        scene.backend.is_pending = False


def _freed_in_copy(scene: Scene) -> object:
    """Close a request while it is saved."""
    with scene.preparing():
        value = scene.offload.save(scene.two)
    try:
        return _pending(scene, lambda each: each.pool.close(each.two))
    finally:
        with scene.preparing():
            scene.offload.discard(value)


UNFIT: tuple[tuple[str, type[KvcheckError], Callable[[Scene], object]], ...] = (
    ("of another model", LayoutMismatch, _restoring(shape_name=lambda scene: "another")),
    ("without its last buffer", LayoutMismatch, _restoring(buffers=lambda scene: scene.saved.buffers[:-1])),
    ("with its buffers in another order", LayoutMismatch, _reordered),
    ("of other layers", LayoutMismatch, _restoring(layout=lambda scene: scene.saved.layout[:-1])),
    ("of other pages", LayoutMismatch, _restoring(page_size=lambda scene: scene.page + 1)),
    ("of one token more than the pages hold", LengthMismatch, _restoring(tokens=lambda scene: 2 * scene.page + 1)),
    ("of fewer tokens than it has rows", LengthMismatch, _restoring(tokens=lambda scene: scene.page)),
    ("whose window begins later", LengthMismatch, _restoring(window_start=lambda scene: 1)),
    ("of another request", ForeignAccess, _restoring(request=lambda scene: 2)),
    ("of a number that is not kept", ForeignAccess, _restoring(number=lambda scene: 1 << 20)),
    ("one of whose buffers lacks a row", LengthMismatch, _row_less),
    ("into a holding with shared pages", ForeignAccess, _into(shared=lambda scene: 1)),
    (
        "into another request's pages",
        ForeignAccess,
        _into(pages=lambda scene: np.concatenate((scene.one.pages[:1], scene.two.pages))),
    ),
    (
        "into a page that is not allocated",
        ForeignAccess,
        _into(pages=lambda scene: ids(int(scene.one.pages[0]), int(scene.closed.pages[0]))),
    ),
    ("into one page less", LengthMismatch, _into(pages=lambda scene: scene.one.pages[:1])),
    ("into a holding whose window is gone", LengthMismatch, _into_gone),
)

VALUES: tuple[Misuse[Scene], ...] = (
    *(Misuse(f"restore of a value {what}", error, attempt) for what, error, attempt in UNFIT),
    Misuse(
        "restore of a value that was dropped",
        ForeignAccess,
        lambda scene: scene.offload.restore(scene.dropped, scene.one),
    ),
    Misuse("discard of a value that was dropped", DoubleFree, lambda scene: scene.offload.discard(scene.dropped)),
    Misuse(
        "discard of a value that was saved elsewhere",
        DoubleFree,
        lambda scene: scene.offload.discard(varied(scene.saved, number=1 << 20)),
    ),
    Misuse(
        "discard of a value that is being copied",
        FreeInFlight,
        lambda scene: _pending(scene, lambda each: each.offload.discard(each.saved)),
    ),
    Misuse("close of a request that is being saved", FreeInFlight, _freed_in_copy),
    Misuse("save, restore and discard", None, _restored),
    Misuse("save of -1 tokens", LengthMismatch, _saving(committed=lambda scene: -1)),
    Misuse(
        "save of one token more than the pages hold",
        LengthMismatch,
        _saving(committed=lambda scene: 2 * scene.page + 1),
    ),
    Misuse("save of a window with a hole", LengthMismatch, _save_holes),
    Misuse("save of all tokens that the pages hold", None, _save_all),
)


def value_attempts(scene: Scene) -> list[Attempt]:
    """Of the scene's offloaded values."""
    return on_each(VALUES, scene, Scene.kept)
