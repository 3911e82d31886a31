"""Misuse of what peers send: messages, layouts and seals, and of the pairs and blocks that are worked out from them.

Invariants:
- Each wrong message differs from a right one in one field, and so does each wrong layout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcheck.core.base.errors import LayoutMismatch, LengthMismatch, TransferError
from kvcheck.core.cache.transfer.blocks import PageRun, RowLayout, ShardSlice, byte_blocks, pair_pages, shard_slices
from kvcheck.core.cache.transfer.layout import (
    BufferLayout,
    EndLayout,
    check_layouts,
    check_rejoin,
    layout_from_json,
    layout_to_json,
)
from kvcheck.core.cache.transfer.messages import (
    INDICES,
    MAX_MESSAGE_BYTES,
    MAX_ROW_BYTES,
    ROOMS,
    Abort,
    AuxData,
    Done,
    Drained,
    Message,
    Status,
    Want,
    decode,
    encode,
)
from kvcheck.core.cache.transfer.seal import SEAL_BYTES, Seal, parse
from kvcheck.core.cache.transfer.wire import check_region
from kvcheck.core.targets.misuse.call import Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import ids, varied


@dataclass(frozen=True, slots=True)
class Peers:
    """Layouts of a source and of a target that fit. plain: the source's, as it is sent."""

    source: EndLayout
    target: EndLayout
    plain: Mapping[str, object]


RIGHT: tuple[Message, ...] = (
    Want(room=1, attempt=0, generation=1, request=1, tokens=1, slot=0, state_slot=0, runs=(("kv.full", 0, (1, 2)),)),
    Status(room=1, generation=1, is_ok=True),
    Done(room=1, generation=1, is_ok=False, reason="why"),
    Abort(room=1, attempt=1, generation=1, reason="why"),
    Drained(room=1, generation=1),
    AuxData(room=1, generation=1, slot=0, row="00ff"),
)
NUMBERS = {
    "room": ROOMS,
    "generation": ROOMS,
    "attempt": INDICES,
    "request": INDICES,
    "tokens": INDICES,
} | dict.fromkeys(("slot", "state_slot"), INDICES)
WRONG_RUNS: tuple[object, ...] = (
    "kv.full",
    [["kv.full", 0]],
    [["kv.full", 0, [1], 2]],
    [[1, 0, [1]]],
    [["\ud800", 0, [1]]],
    [["kv.full", -1, [1]]],
    [["kv.full", INDICES, [1]]],
    [["kv.full", True, [1]]],
    [["kv.full", 0, 1]],
    [["kv.full", 0, [-1]]],
    [["kv.full", 0, [1, INDICES]]],
    [["kv.full", 0, [1.0]]],
    ["kvs"],
)


def _wrong_values(name: str) -> tuple[object, ...]:
    """Values that the field of a message cannot have."""
    if name in NUMBERS:
        return (-1, NUMBERS[name], True, 1.0, "1", None)
    if name == "is_ok":
        return (1, "true", None)
    if name == "reason":
        return (1, None, "\ud800", "\udfff")
    if name == "row":
        return ("0", "FF", "0g", "00\n", 0, "00" * (MAX_ROW_BYTES + 1))
    return WRONG_RUNS


def _text(message: Message, **changes: object) -> bytes:
    return json.dumps([type(message).__name__, asdict(message) | changes]).encode()


def _wrong_messages() -> Iterator[tuple[str, bytes]]:
    """By what is wrong with it."""
    seen = set()
    for message in RIGHT:
        for name in asdict(message):
            if name not in seen or name in ("room", "is_ok"):
                seen.add(name)
                for value in _wrong_values(name):
                    yield f"{type(message).__name__} with {name} {value!r:.24}", _text(message, **{name: value})
    yield "Drained without its room", b'["Drained",{"generation":1}]'
    yield "Drained with a field that it lacks", b'["Drained",{"generation":1,"room":1,"slot":1}]'
    yield "a message of an unknown kind", b'["Other",{}]'
    yield "a list of one", b'["Drained"]'
    yield "text that is no JSON", b"[" * 9
    yield "bytes that are no text", b'["\xff"]'


def _right_values() -> Iterator[Message]:
    """Messages with the least and the greatest values."""
    yield from RIGHT
    for name, stop in NUMBERS.items():
        kind = RIGHT[5] if name == "slot" else RIGHT[0]
        yield varied(kind, **{name: 0})
        yield varied(kind, **{name: stop - 1})
    yield varied(RIGHT[0], runs=(("", 0, (0, INDICES - 1)), ("x", INDICES - 1, ())))
    yield varied(RIGHT[3], reason="\ud7ff\ue000")
    yield varied(RIGHT[5], row="")


def _longest(peers: Peers) -> bool:
    """A right message, and blanks up to the greatest length."""
    return decode(encode(RIGHT[4]).ljust(MAX_MESSAGE_BYTES)) == RIGHT[4]


def _too_long(peers: Peers) -> Message:
    """A right message, and blanks up to one byte beyond the greatest length."""
    return decode(encode(RIGHT[4]).ljust(MAX_MESSAGE_BYTES + 1))


def _decoded(text: bytes) -> Callable[[Peers], object]:
    return lambda peers: decode(text)


MESSAGES: tuple[Misuse[Peers], ...] = (
    *(Misuse(f"message: {what}", TransferError, _decoded(text)) for what, text in _wrong_messages()),
    Misuse(
        "messages with the least and the greatest values",
        None,
        lambda peers: all(decode(encode(each)) == each for each in _right_values()),
    ),
    Misuse("a message that is one byte too long", TransferError, _too_long),
    Misuse("a message of the greatest length", None, _longest),
)


def _layout(**changes: Callable[[EndLayout], object]) -> Callable[[Peers], object]:
    """Compare with a peer's layout that differs in these fields."""
    return lambda peers: check_layouts(
        peers.source, varied(peers.target, **{name: of(peers.target) for name, of in changes.items()})
    )


def _buffer(change: Callable[[BufferLayout], BufferLayout]) -> Callable[[Peers], object]:
    """Compare with a peer's layout whose last buffer differs."""
    return _layout(buffers=lambda layout: (*layout.buffers[:-1], change(layout.buffers[-1])))


def _fields(layout: EndLayout) -> object:
    *first, (name, width, dtype, offset) = layout.fields
    return (*first, (name, width + 1, dtype, offset))


def _json(**changes: object) -> Callable[[Peers], object]:
    """Read a layout that differs in these values."""
    return lambda peers: layout_from_json({**peers.plain, **changes})


def _json_fields(row: list[object]) -> Callable[[Peers], object]:
    """Read a layout with a right field and this one."""
    return _json(fields=[["right", 1, "b", 1], row])


def _json_without(name: str) -> Callable[[Peers], object]:
    return lambda peers: layout_from_json({key: each for key, each in peers.plain.items() if key != name})


LAYOUTS: tuple[Misuse[Peers], ...] = (
    Misuse("a peer of another model", LayoutMismatch, _layout(model=lambda layout: "another")),
    Misuse("a peer with other pages", LayoutMismatch, _layout(page_size=lambda layout: layout.page_size + 1)),
    Misuse("a peer with another window", LayoutMismatch, _layout(window=lambda layout: layout.window + 1)),
    Misuse("a peer with another field", LayoutMismatch, _layout(fields=_fields)),
    Misuse("a peer with a buffer less", LayoutMismatch, _layout(buffers=lambda layout: layout.buffers[:-1])),
    Misuse("a peer with a buffer of another name", LayoutMismatch, _buffer(lambda each: varied(each, name="another"))),
    Misuse("a peer with a buffer of another leg", LayoutMismatch, _buffer(lambda each: varied(each, leg="another"))),
    Misuse(
        "a peer with a buffer of another dtype", LayoutMismatch, _buffer(lambda each: varied(each, dtype="another"))
    ),
    Misuse(
        "a peer with a buffer of other layers",
        LayoutMismatch,
        _buffer(lambda each: varied(each, layers=tuple(layer + 1 for layer in each.layers))),
    ),
    Misuse(
        "a peer with a buffer of more shards",
        LayoutMismatch,
        _buffer(lambda each: varied(each, total_shards=each.total_shards + 1)),
    ),
    Misuse(
        "a peer with other rows of a page",
        LayoutMismatch,
        _buffer(lambda each: varied(each, rows=varied(each.rows, rows_per_unit=each.rows.rows))),
    ),
    Misuse(
        "a peer with longer shards",
        LayoutMismatch,
        _buffer(lambda each: varied(each, rows=varied(each.rows, row_bytes=each.rows.row_bytes * 2))),
    ),
    Misuse(
        "a peer whose slots are shorter than a row",
        LayoutMismatch,
        _layout(row_bytes=lambda layout: layout.packed_bytes - 1),
    ),
    Misuse(
        "a peer whose slots are as long as a row",
        None,
        lambda peers: _layout(row_bytes=lambda layout: layout.packed_bytes)(peers),
    ),
    Misuse(
        "an end whose slots are shorter than a row",
        LayoutMismatch,
        lambda peers: check_layouts(varied(peers.source, row_bytes=peers.source.packed_bytes - 1), peers.target),
    ),
    Misuse("a peer that fits", None, lambda peers: check_layouts(peers.source, peers.target)),
    Misuse(
        "a peer of another rank after its restart",
        LayoutMismatch,
        lambda peers: check_rejoin(peers.source, peers.target, varied(peers.target, rank=1)),
    ),
    Misuse(
        "a peer of other ranks after its restart",
        LayoutMismatch,
        lambda peers: check_rejoin(peers.source, peers.target, varied(peers.target, ranks=2)),
    ),
    Misuse(
        "a peer that no longer fits after its restart",
        LayoutMismatch,
        lambda peers: check_rejoin(peers.source, peers.target, varied(peers.target, model="another")),
    ),
    Misuse(
        "a peer that does not fit at its first start",
        LayoutMismatch,
        lambda peers: check_rejoin(peers.source, None, varied(peers.target, model="another")),
    ),
    Misuse(
        "a peer that was not known",
        None,
        lambda peers: check_rejoin(peers.source, None, varied(peers.target, ranks=2)),
    ),
    Misuse("a layout that is a list", LayoutMismatch, lambda peers: layout_from_json([])),
    *(
        Misuse(f"a layout without {name}", LayoutMismatch, _json_without(name))
        for name in ("end", "rank", "buffers", "fields", "slots")
    ),
    *(
        Misuse(f"a layout with {name} as text", LayoutMismatch, _json(**{name: "1"}))
        for name in ("rank", "ranks", "page_size", "window", "row_bytes", "slots")
    ),
    *(
        Misuse(f"a layout with {name} as a number", LayoutMismatch, _json(**{name: 1}))
        for name in ("end", "model", "buffers", "fields")
    ),
    *(
        Misuse(f"a layout with the field {row}", LayoutMismatch, _json_fields(row))
        for row in (
            ["a", 1, "b"],
            [1, 1, "b", 1],
            ["a", "1", "b", 1],
            ["a", 1, 1, 1],
            ["a", 1, "b", True],
            ["a", 1, "b", 1, 1],
        )
    ),
    Misuse(
        "a layout that is read back", None, lambda peers: layout_from_json(layout_to_json(peers.source)) == peers.source
    ),
)

ROWS = {"layers": 1, "rows": 6, "row_bytes": 32, "rows_per_unit": 2, "shards": 2}
"""Of a layout with units 1 and 2."""
PIECE = ShardSlice(source_rank=0, target_rank=0, source_first=0, target_first=0, count=2)


def _rows(**changes: int) -> Callable[[Peers], object]:
    return lambda peers: RowLayout(**(ROWS | changes)).units >= 0


def _blocks(
    runs: tuple[int, int, int] = (1, 1, 1), *, target: Mapping[str, int] | None = None, **piece: int
) -> Callable[[Peers], object]:
    """Blocks of one run: (source, target, count)."""

    def call(peers: Peers) -> bool:
        ours, theirs = RowLayout(**ROWS), RowLayout(**(ROWS | dict(target or {})))
        return len(byte_blocks(ours, theirs, np.array([runs]), varied(PIECE, **piece))) > 0

    return call


def _parts_of_rows(peers: Peers) -> bool:
    """The second shard of each row goes to a target that keeps it alone, row by row, in two runs of units."""
    ours, theirs = RowLayout(**ROWS), RowLayout(**(ROWS | {"row_bytes": 16, "shards": 1}))
    made = byte_blocks(ours, theirs, np.array([(1, 2, 1), (2, 1, 1)]), varied(PIECE, source_first=1, count=1))
    places = [(2, 4), (3, 5), (4, 2), (5, 3)]  # rows at the source, rows at the target
    return np.array_equal(made, [[source * 32 + 16, target * 16, 16] for source, target in places])


def _paired(source: tuple[int, int], target: tuple[int, int], needed: range = range(1, 3)) -> Callable[[Peers], object]:
    """Pair runs of pages: first logical page and count."""

    def call(peers: Peers) -> bool:
        runs = [PageRun(first, np.arange(count) + 1) for first, count in (source, target)]
        return len(pair_pages(runs[0], runs[1], needed=needed, what="misused")) == len(needed)

    return call


def _slices(shards: int, sources: int, targets: int) -> Callable[[Peers], object]:
    return lambda peers: len(shard_slices(shards, sources, targets)) >= targets


def _run(first: int, pages: npt.NDArray[Any]) -> Callable[[Peers], object]:
    return lambda peers: PageRun(first, pages).stop == first + len(pages)


BLOCKS: tuple[Misuse[Peers], ...] = (
    Misuse("a page run from page -1", LayoutMismatch, _run(-1, ids(1))),
    Misuse("a page run in two rows", LayoutMismatch, _run(0, np.array([[1]]))),
    Misuse("a page run of floats", LayoutMismatch, _run(0, np.array([1.0]))),
    Misuse("a page run from page 0", None, _run(0, ids(1))),
    Misuse("a page run without a page", None, _run(0, np.array([]))),
    *(
        Misuse(f"a row layout with {name} 0", LayoutMismatch, _rows(**{name: 0}))
        for name in ("layers", "rows", "row_bytes", "rows_per_unit", "shards")
    ),
    Misuse("a row layout with a part of a unit", LayoutMismatch, _rows(rows=7)),
    Misuse("a row layout with a part of a shard", LayoutMismatch, _rows(row_bytes=33)),
    Misuse("a row layout of ones", None, _rows(layers=1, rows=1, row_bytes=1, rows_per_unit=1, shards=1)),
    Misuse("a source with a page less", LengthMismatch, _paired((1, 1), (1, 2))),
    Misuse("a target with a page less", LengthMismatch, _paired((1, 2), (1, 1))),
    Misuse("a source with a page more", LengthMismatch, _paired((1, 3), (1, 2))),
    Misuse("a target with a page more", LengthMismatch, _paired((1, 2), (1, 3))),
    Misuse("a source that begins a page late", LengthMismatch, _paired((2, 1), (1, 2))),
    Misuse("a target that begins a page late", LengthMismatch, _paired((1, 2), (2, 1))),
    Misuse("a source with pages where none are needed", LengthMismatch, _paired((1, 2), (0, 0), range(0))),
    Misuse("a source and a target that begin a page early", None, _paired((0, 3), (1, 2))),
    Misuse("no pages at either end where none are needed", None, _paired((0, 0), (0, 0), range(0))),
    Misuse("blocks for a target of more layers", LayoutMismatch, _blocks(target={"layers": 2})),
    Misuse("blocks for a target of other rows a unit", LayoutMismatch, _blocks(target={"rows_per_unit": 1})),
    Misuse("blocks for a target of longer shards", LayoutMismatch, _blocks(target={"row_bytes": 64})),
    Misuse("blocks of a piece from shard -1 of the source", LayoutMismatch, _blocks(source_first=-1, count=1)),
    Misuse("blocks of a piece to shard -1 of the target", LayoutMismatch, _blocks(target_first=-1, count=1)),
    Misuse("blocks of a piece of no shard", LayoutMismatch, _blocks(count=0)),
    Misuse(
        "blocks of a piece behind the source's last shard",
        LayoutMismatch,
        _blocks(source_first=1, target={"row_bytes": 64, "shards": 4}),
    ),
    Misuse(
        "blocks of a piece behind the target's last shard",
        LayoutMismatch,
        _blocks(target_first=1, target={"row_bytes": 32}),
    ),
    Misuse("blocks of the target's last shard", None, _blocks(source_first=1, target_first=1, count=1)),
    Misuse("blocks from the source's padding", LayoutMismatch, _blocks((0, 1, 1))),
    Misuse("blocks to the target's padding", LayoutMismatch, _blocks((1, 0, 1))),
    Misuse("blocks from behind the source's last unit", LayoutMismatch, _blocks((2, 1, 2))),
    Misuse("blocks to behind the target's last unit", LayoutMismatch, _blocks((1, 2, 2))),
    Misuse("blocks of no unit", LayoutMismatch, _blocks((1, 1, 0))),
    Misuse("blocks of all units", None, _blocks((1, 1, 2))),
    Misuse("blocks of the last unit", None, _blocks((2, 2, 1))),
    Misuse("blocks of parts of rows in two runs", None, _parts_of_rows),
    Misuse("shards for no target", LayoutMismatch, _slices(2, 1, 0)),
    Misuse("shards for no source", LayoutMismatch, _slices(2, 0, 1)),
    Misuse("shards for sources that do not divide them", LayoutMismatch, _slices(2, 3, 2)),
    Misuse("shards for targets that do not divide them", LayoutMismatch, _slices(2, 2, 3)),
    Misuse("shards for more sources and fewer targets", None, _slices(2, 4, 1)),
)


def _seal(**changes: int) -> Callable[[Peers], object]:
    given = {"room": 1, "generation": 1, "bytes": 1, "digest": 1} | changes
    return lambda peers: parse(Seal(**given).packed()) == Seal(**given)


def _torn(at: int) -> Callable[[Peers], object]:
    """A seal with one byte changed is none."""

    def call(peers: Peers) -> bool:
        row = Seal(room=1, generation=1, bytes=1, digest=1).packed()
        row[at] ^= 1
        return parse(row) is None

    return call


EVERY = ("room", "generation", "bytes", "digest")
SEALS: tuple[Misuse[Peers], ...] = (
    *(Misuse(f"a seal with {name} -1", LayoutMismatch, _seal(**{name: -1})) for name in EVERY),
    *(Misuse(f"a seal with {name} 2**64", LayoutMismatch, _seal(**{name: ROOMS})) for name in EVERY),
    Misuse("a seal of zeros", None, _seal(room=0, generation=0, bytes=0, digest=0)),
    Misuse("a seal of the greatest values", None, _seal(**dict.fromkeys(EVERY, ROOMS - 1))),
    *(Misuse(f"a seal with another byte {at}", None, _torn(at)) for at in (0, 8, 16, 40, 48, 56, SEAL_BYTES - 1)),
    Misuse(
        "parse of one byte less than a seal",
        LayoutMismatch,
        lambda peers: parse(torch.zeros(SEAL_BYTES - 1, dtype=torch.uint8)),
    ),
    Misuse(
        "parse of one byte more than a seal",
        LayoutMismatch,
        lambda peers: parse(torch.zeros(SEAL_BYTES + 1, dtype=torch.uint8)),
    ),
    Misuse("parse of signed bytes", LayoutMismatch, lambda peers: parse(torch.zeros(SEAL_BYTES, dtype=torch.int8))),
    Misuse(
        "a region of words", LayoutMismatch, lambda peers: check_region("misused", torch.zeros(2, dtype=torch.int64))
    ),
    Misuse(
        "a region in two rows",
        LayoutMismatch,
        lambda peers: check_region("misused", torch.zeros((2, 2), dtype=torch.uint8)),
    ),
    Misuse(
        "a region with gaps",
        LayoutMismatch,
        lambda peers: check_region("misused", torch.zeros(4, dtype=torch.uint8)[::2]),
    ),
    Misuse("a region of bytes", None, lambda peers: check_region("misused", torch.zeros(2, dtype=torch.uint8))),
)


def text_attempts(source: EndLayout, target: EndLayout) -> list[Attempt]:
    """Of what these two ends tell each other."""
    raw = layout_to_json(source)
    assert isinstance(raw, dict)
    return on_each((*MESSAGES, *LAYOUTS, *BLOCKS, *SEALS), Peers(source, target, raw), lambda peers: None)
