"""EndLayout: describes a rank's memory. Two ends compare their layouts before any byte moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.base.record import value_from
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity
from kvcheck.core.cache.pools.pool import KVPool
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.blocks import RowLayout, ShardSlice, shard_slices
from kvcheck.core.cache.transfer.metadata import MetadataBuffers

Piece = tuple[str, str]
"""A buffer by space and name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferLayout:
    """total_shards: of a whole row, over all ranks. leg: "kv" or "state"."""

    space: str
    name: str
    leg: str
    dtype: str
    layers: tuple[int, ...]
    total_shards: int
    rows: RowLayout

    @property
    def region(self) -> str:
        return f"{self.space}.{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndLayout:
    """One rank of one end. fields: (name, width, dtype, offset) of the metadata row. row_bytes: from slot to slot."""

    end: str
    rank: int
    ranks: int
    model: str
    page_size: int
    window: int
    buffers: tuple[BufferLayout, ...]
    fields: tuple[tuple[str, int, str, int], ...]
    row_bytes: int
    slots: int

    @property
    def name(self) -> str:
        return f"{self.end}-{self.rank}"

    @property
    def parts(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted({(each.leg, each.space) for each in self.buffers}))

    @property
    def packed_bytes(self) -> int:
        """Bytes up to the end of the last field, the room, of 8-byte values."""
        _, width, _, offset = self.fields[-1]
        return offset + 8 * width


def end_layout(pool: KVPool, metadata: MetadataBuffers, *, whole: ModelShape, rank: int, ranks: int) -> EndLayout:
    """whole: the model's shape before it was split over ranks."""
    totals = {(spec.name, each.name): each.shards for spec in POOLS.load(whole.family)(whole) for each in spec.buffers}
    buffers = tuple(
        BufferLayout(
            space=space,
            name=buffer.name,
            leg=leg_of(space, buffer),
            dtype=str(buffer.dtype),
            layers=pool.sets[space].spec.layers,
            total_shards=totals[space, buffer.name],
            rows=RowLayout(
                layers=len(pool.sets[space].spec.layers),
                rows=pool.sets[space].write_view(buffer.name).shape[1],
                row_bytes=buffer.row_bytes,
                rows_per_unit=pool.page_size if buffer.rows is Granularity.TOKEN else 1,
                shards=buffer.shards,
            ),
        )
        for space, buffer in pool.buffers()
    )
    return EndLayout(
        end=metadata.end,
        rank=rank,
        ranks=ranks,
        model=whole.name,
        page_size=pool.page_size,
        window=whole.window if whole.window_layers else 0,
        buffers=buffers,
        fields=tuple((each.name, each.width, str(each.dtype), each.offset) for each in metadata.fields),
        row_bytes=metadata.row_bytes,
        slots=metadata.slots.count,
    )


def leg_of(space: str, buffer: BufferSpec) -> str:
    """Token rows of the full context are sent chunk by chunk, all else at the end."""
    return "kv" if space == "full" and buffer.rows is Granularity.TOKEN else "state"


def check_layouts(mine: EndLayout, theirs: EndLayout) -> None:
    """Raise LayoutMismatch, naming both values, unless the layouts of the two ends fit."""
    for name in ("model", "page_size", "window", "fields"):
        _same(mine, theirs, name, getattr(mine, name), getattr(theirs, name))
    ours, others = ({(b.space, b.name): b for b in each.buffers} for each in (mine, theirs))
    _same(mine, theirs, "buffers", sorted(ours), sorted(others))
    for key, buffer in ours.items():
        other = others[key]
        for name in ("leg", "dtype", "layers", "total_shards"):
            _same(mine, theirs, f"{name} of {buffer.region}", getattr(buffer, name), getattr(other, name))
        for name in ("rows_per_unit", "shard_bytes"):
            _same(mine, theirs, f"{name} of {buffer.region}", getattr(buffer.rows, name), getattr(other.rows, name))
    for each in (mine, theirs):
        if each.row_bytes < each.packed_bytes:
            raise LayoutMismatch(
                f"row_bytes of {each.name}: expected at least the {each.packed_bytes} bytes of all fields, got "
                f"{each.row_bytes}"
            )


def _same(mine: EndLayout, theirs: EndLayout, what: str, ours: object, others: object) -> None:
    if ours != others:
        raise LayoutMismatch(
            f"{what} differs: {mine.name} has {str(ours)[:120]}, {theirs.name} has {str(others)[:120]}; expected "
            "the same at both ends"
        )


def routes(layout: EndLayout, *, sources: int, targets: int) -> Mapping[tuple[int, int], Mapping[Piece, ShardSlice]]:
    """(source rank, target rank) -> buffer -> its shards, without empty pairs."""
    found: dict[tuple[int, int], dict[Piece, ShardSlice]] = {}
    for buffer in layout.buffers:
        for piece in shard_slices(buffer.total_shards, sources, targets):
            pieces = found.setdefault((piece.source_rank, piece.target_rank), {})
            assert (buffer.space, buffer.name) not in pieces, "neighbouring shards of two ranks are one slice"
            pieces[buffer.space, buffer.name] = piece
    return found


def sources_of(pairs: Mapping[tuple[int, int], object], target: int) -> list[int]:
    """Source ranks of a target rank; the first sends the metadata row."""
    return sorted(source for source, each in pairs if each == target)


_KINDS = (str, int, str, int)


def layout_from_json(raw: object) -> EndLayout:
    """Parse a peer's layout. Raise LayoutMismatch."""
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"expected an object, got {type(raw).__name__}")
        fields = tuple(tuple(row) for row in raw["fields"])
        if any(tuple(map(type, row)) != _KINDS for row in fields):
            raise ValueError("fields: expected [name, width, dtype, offset] of each")
        return EndLayout(
            **{name: value_from(str, raw[name], name) for name in ("end", "model")},
            **{name: value_from(int, raw[name], name) for name in ("rank", "ranks", "page_size", "window")},
            **{name: value_from(int, raw[name], name) for name in ("row_bytes", "slots")},
            buffers=value_from(tuple[BufferLayout, ...], raw["buffers"], "buffers"),
            fields=fields,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise LayoutMismatch(f"a peer's layout is none: {error}") from error
