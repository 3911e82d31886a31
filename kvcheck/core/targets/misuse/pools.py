"""Misuse of a pool, its tables and its offloaded values, and sizes and shapes that no pool can have.

Invariants:
- A forged holding differs from a real one in what its row names, so each condition of a check is met by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kvcheck.core.base.errors import DoubleFree, ForeignAccess, FreeInFlight, LayoutMismatch, LengthMismatch
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, Piece
from kvcheck.core.cache.pools.pool import Given, Holding
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.pools.sharding import rank_shape, shard_range
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import LONGEST, PAGES, ROWS, Scene, ids, varied

CLOSED: dict[str, Callable[[Scene], Holding]] = {
    "a closed holding": lambda scene: scene.closed,
    "a holding whose row is another request's": lambda scene: varied(scene.one, request=2),
    "a holding whose row nobody has": lambda scene: varied(scene.one, row=scene.closed.row),
    "a holding that says it is closed": lambda scene: varied(scene.one, is_open=False),
    "a holding in row -1": lambda scene: varied(scene.one, row=-1),
}
METHODS: dict[str, Callable[[Scene, Holding], object]] = {
    "adopt": lambda scene, held: scene.pool.adopt(held, ids(), ids()),
    "grow": lambda scene, held: scene.pool.grow(held, 1, query=0),
    "commit": lambda scene, held: scene.pool.commit(held, 0),
    "evict_window": lambda scene, held: scene.pool.evict_window(held, 0),
    "extent": lambda scene, held: scene.pool.extent(held, 1),
    "save": lambda scene, held: scene.offload.save(held),
    "restore": lambda scene, held: scene.offload.restore(scene.saved, held),
}


def _use_of(method: str, holding: str, scene: Scene) -> object:
    return METHODS[method](scene, CLOSED[holding](scene))


USES = tuple(
    Misuse(f"{method} with {holding}", ForeignAccess, partial(_use_of, method, holding))
    for method in METHODS
    for holding in CLOSED
)


def _adopt_all(scene: Scene) -> bool:
    """A holding adopts as many pages as the longest request has, and is emptied again."""
    pages = np.concatenate((scene.one.pages, scene.two.pages))[:LONGEST]
    scene.pool.adopt(scene.none, pages, np.zeros(len(pages), dtype=np.int64) if scene.pool.has_window else ids())
    is_right = scene.none.committed == LONGEST * scene.page and scene.none.shared == LONGEST
    scene.pool.commit(scene.none, 0)
    scene.none.pages, scene.none.window_pages, scene.none.shared = ids(), ids(), 0
    return is_right


def _adopt_more(scene: Scene) -> None:
    pages = np.concatenate((scene.one.pages, scene.two.pages, scene.one.pages))[: LONGEST + 1]
    scene.pool.adopt(scene.none, pages, ids())


def _commit_edges(scene: Scene) -> bool:
    """From nothing up to all pages."""
    before = scene.one.committed
    for tokens in (0, 2 * scene.page, before):
        scene.pool.commit(scene.one, tokens)
    return scene.one.committed == before


def _grow_edges(scene: Scene) -> bool:
    """There is a row for one more request and no other, and a request that is too long gets no page."""
    last = scene.pool.open(9)
    if last is None or scene.pool.open(10) is not None:
        return False
    scene.pool.close(last)
    return scene.pool.grow(scene.two, LONGEST * scene.page + 1, query=0) is False


def _close_pinned(scene: Scene) -> None:
    scene.pool.allocators["full"].pin(scene.two.pages)
    try:
        scene.pool.close(scene.two)
    finally:
        scene.pool.allocators["full"].unpin(scene.two.pages)


def _with_foreign_state(scene: Scene) -> object:
    if not scene.pool.has_state:
        return NOT_NOW
    scene.pool.close(varied(scene.two, state_slot=scene.one.state_slot))
    return None


def _with_foreign_window(scene: Scene) -> object:
    if not scene.pool.has_window:
        return NOT_NOW
    scene.pool.close(varied(scene.two, window_pages=scene.one.window_pages[:1]))
    return None


def _reopened(scene: Scene) -> bool:
    """A request is closed and opened again in the same row."""
    scene.pool.close(scene.none, given=Given.nothing(0))
    again = scene.pool.open(3)
    if again is None:
        return False
    scene.none = again
    return True


POOL: tuple[Misuse[Scene], ...] = (
    *USES,
    Misuse("close of a closed holding", DoubleFree, lambda scene: scene.pool.close(scene.closed)),
    Misuse(
        "close of a holding that says it is closed",
        DoubleFree,
        lambda scene: scene.pool.close(varied(scene.two, is_open=False)),
    ),
    Misuse(
        "close of a holding whose row is another request's",
        ForeignAccess,
        lambda scene: scene.pool.close(varied(scene.two, request=1)),
    ),
    Misuse(
        "close of a holding with another request's pages",
        ForeignAccess,
        lambda scene: scene.pool.close(varied(scene.two, pages=scene.one.pages)),
    ),
    Misuse(
        "close of a holding that names a page twice",
        DoubleFree,
        lambda scene: scene.pool.close(varied(scene.two, pages=scene.two.pages.repeat(2))),
    ),
    Misuse("close of a holding with another request's state", ForeignAccess, _with_foreign_state),
    Misuse("close of a holding with another request's window", ForeignAccess, _with_foreign_window),
    Misuse("close of a holding with a pinned page", FreeInFlight, _close_pinned),
    Misuse("close and open", None, _reopened),
    Misuse(
        "adopt into a holding that has pages",
        LengthMismatch,
        lambda scene: scene.pool.adopt(scene.two, scene.one.pages[:1], ids()),
    ),
    Misuse("adopt of one page more than the longest request has", LengthMismatch, _adopt_more),
    Misuse("adopt of as many pages as the longest request has", None, _adopt_all),
    Misuse(
        "adopt of a page that is not allocated",
        ForeignAccess,
        lambda scene: scene.pool.adopt(scene.none, ids(int(scene.one.pages[0]), PAGES + 1), ids()),
    ),
    Misuse("commit of -1 tokens", LengthMismatch, lambda scene: scene.pool.commit(scene.one, -1)),
    Misuse(
        "commit of one token more than the pages hold",
        LengthMismatch,
        lambda scene: scene.pool.commit(scene.one, 2 * scene.page + 1),
    ),
    Misuse("commit of no token, and of all that the pages hold", None, _commit_edges),
    Misuse("open without a row, and grow beyond the longest request", None, _grow_edges),
)


def _pool_of(**changes: int) -> Callable[[Scene], object]:
    """A pool of other sizes."""

    return lambda scene: scene.make_pool(varied(scene.sizes, **changes))


def _windowless(scene: Scene) -> object:
    return scene.make_pool(varied(scene.sizes, window_pages=0)) if scene.pool.has_window else NOT_NOW


def _stateless(scene: Scene) -> object:
    return scene.make_pool(varied(scene.sizes, state_slots=-1)) if scene.pool.has_state else NOT_NOW


def _buffer(**changes: object) -> Callable[[Scene], object]:
    """A buffer of two shards of 8 bytes, with some changes."""
    rows = {"name": "x", "rows": Granularity.TOKEN, "item_shape": (2, 8), "dtype": torch.uint8, "shards": 2} | changes
    return lambda scene: BufferSpec(**rows)  # type: ignore[arg-type]


def _shape(**changes: object) -> Callable[[Scene], object]:
    """A small shape, with some changes."""
    rows = {"name": "x", "family": "mha", "page_size": 1, "full_layers": (0,)} | changes
    return lambda scene: ModelShape(**rows)  # type: ignore[arg-type]


def _shards(shards: int, rank: int, size: int) -> Callable[[Scene], object]:
    return lambda scene: shard_range(shards, rank, size)


def _states(**changes: object) -> Callable[[Scene], object]:
    """The buffer table of a mamba shape, with some changes."""

    def made(scene: Scene) -> object:
        if not scene.pool.has_state:
            return NOT_NOW
        return POOLS.load("mamba")(varied(scene.shape, **changes))

    return made


PIECES = (Piece("key", 0, 8),)
TWO_LAYERS = {"full_layers": (0,), "window_layers": (1,)}

SIZES: tuple[Misuse[Scene], ...] = (
    Misuse("a pool without a page", LayoutMismatch, _pool_of(pages=0)),
    Misuse("a pool of one page", None, _pool_of(pages=1, window_pages=1)),
    Misuse("a pool without a window page", LayoutMismatch, _windowless),
    Misuse("a pool with -1 state slots", LayoutMismatch, _stateless),
    Misuse("a buffer whose row is no multiple of 8 bytes", LayoutMismatch, _buffer(item_shape=(9,), shards=1)),
    Misuse("a buffer of page rows without pieces", LayoutMismatch, _buffer(rows=Granularity.PAGE, shards=1)),
    Misuse("a buffer of token rows with pieces", LayoutMismatch, _buffer(pieces=PIECES, shards=1)),
    Misuse("a buffer of slot rows with pieces", LayoutMismatch, _buffer(rows=Granularity.SLOT, pieces=PIECES)),
    Misuse("a buffer without a shard", LayoutMismatch, _buffer(shards=0)),
    Misuse("a buffer with -1 shards", LayoutMismatch, _buffer(shards=-1)),
    Misuse("a buffer whose shards are no multiple of 8 bytes", LayoutMismatch, _buffer(item_shape=(24,), shards=2)),
    Misuse("a buffer whose page rows are dealt out", LayoutMismatch, _buffer(rows=Granularity.PAGE, pieces=PIECES)),
    Misuse("a buffer of two shards", None, _buffer()),
    Misuse("a buffer of one shard of 8 bytes", None, _buffer(item_shape=(8,), shards=1)),
    Misuse("a buffer of whole page rows", None, _buffer(rows=Granularity.PAGE, pieces=PIECES, shards=1)),
    Misuse("a shape without a layer", LayoutMismatch, _shape(full_layers=())),
    Misuse("a shape that leaves a layer out", LayoutMismatch, _shape(full_layers=(0, 2))),
    Misuse("a shape that names a layer twice", LayoutMismatch, _shape(full_layers=(0, 0))),
    Misuse("a shape with pages of 0 tokens", LayoutMismatch, _shape(page_size=0)),
    Misuse("a shape with pages of one token", None, _shape()),
    Misuse("a shape with a window of 0 tokens", LayoutMismatch, _shape(**TWO_LAYERS, window=0)),
    Misuse("a shape with a window of one token", None, _shape(**TWO_LAYERS, window=1)),
    Misuse("a shape without window layers", None, _shape(window=0)),
    Misuse(
        "a shape whose index keys are no whole quantisation blocks",
        LayoutMismatch,
        _shape(index_head_dim=12, index_quant_block=8),
    ),
    Misuse("a shape whose index keys are whole blocks", None, _shape(index_head_dim=16, index_quant_block=8)),
    Misuse("shards of a row without one", LayoutMismatch, _shards(0, 0, 1)),
    Misuse("shards of rank -1", LayoutMismatch, _shards(1, -1, 1)),
    Misuse("shards of a rank above the last", LayoutMismatch, _shards(2, 2, 2)),
    Misuse("shards over ranks that they do not divide", LayoutMismatch, _shards(2, 0, 3)),
    Misuse("shards that the ranks do not divide", LayoutMismatch, _shards(3, 0, 2)),
    Misuse("one shard on one rank", None, _shards(1, 0, 1)),
    Misuse("two shards on four ranks", None, _shards(2, 3, 4)),
    Misuse("four shards on two ranks", None, _shards(4, 1, 2)),
    Misuse(
        "heads of a state that its channels are no multiple of",
        LayoutMismatch,
        lambda scene: rank_shape(varied(scene.shape, ssm_heads=2, conv_dim=3), 0, 1),
    ),
    Misuse("a state without heads", LayoutMismatch, _states(ssm_heads=0)),
    Misuse("a state with channels that heads do not divide", LayoutMismatch, _states(ssm_heads=2, conv_dim=3)),
    Misuse("a state as it is", None, _states()),
)


def _write_edges(scene: Scene) -> bool:
    """The last row and the last column are part of the table; no value is no write."""
    columns = scene.sizes.max_tokens
    table = scene.pool.tables["req_to_token"]
    table.write(ROWS, columns - 1, ids(0))
    table.write(1, columns, ids())
    scene.pool.tables["full_to_window"].assign(ids(0, PAGES), ids(0, 0))
    return True


def _write(row: int, start: int | None, values: int) -> Callable[[Scene], object]:
    """start: None is the last column."""

    def call(scene: Scene) -> None:
        first = scene.sizes.max_tokens - 1 if start is None else start
        scene.pool.tables["req_to_token"].write(row, first, np.zeros(values, dtype=np.int64))

    return call


TABLES: tuple[Misuse[Scene], ...] = (
    Misuse("write to table row -1", LengthMismatch, _write(-1, 0, 1)),
    Misuse("write to a table row above the last", LengthMismatch, _write(ROWS + 1, 0, 1)),
    Misuse("write of nothing to a table row above the last", LengthMismatch, _write(ROWS + 1, 0, 0)),
    Misuse("write before the first column", LengthMismatch, _write(1, -1, 2)),
    Misuse("write behind the last column", LengthMismatch, _write(1, None, 2)),
    Misuse("write to the last row and column", None, _write_edges),
    Misuse(
        "assign of two values to one column",
        LengthMismatch,
        lambda scene: scene.pool.tables["full_to_window"].assign(ids(1), ids(1, 2)),
    ),
    Misuse(
        "assign of one value to two columns",
        LengthMismatch,
        lambda scene: scene.pool.tables["full_to_window"].assign(ids(1, 2), ids(1)),
    ),
    Misuse(
        "assign behind the last column",
        LengthMismatch,
        lambda scene: scene.pool.tables["full_to_window"].assign(ids(1, PAGES + 1), ids(0, 0)),
    ),
    Misuse(
        "assign to column -1",
        LengthMismatch,
        lambda scene: scene.pool.tables["full_to_window"].assign(ids(-1), ids(0)),
    ),
    Misuse(
        "a buffer that the table lacks", LayoutMismatch, lambda scene: scene.pool.sets["full"].buffer("no such buffer")
    ),
)


def pool_attempts(scene: Scene) -> list[Attempt]:
    """Of the scene's pool and tables, and of what pools are made from."""
    return on_each((*POOL, *SIZES, *TABLES), scene, Scene.kept)
