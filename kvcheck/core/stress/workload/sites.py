"""Sites of a run: the rows and buffers of the whole model that hold content words."""

from __future__ import annotations

from kvcheck.core.base.content import RowSites
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import BufferSpec, Granularity, SpaceSpec
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.stress.workload.handover import PLAIN_FIELDS


def row_sites(shape: ModelShape) -> tuple[RowSites, ...]:
    rows = [
        row
        for spec in POOLS.load(shape.family)(shape)
        for buffer in spec.buffers
        for row in _of_buffer(shape, spec, buffer)
    ]
    fields = (
        RowSites(
            space="metadata",
            buffer=f"metadata.{field.name}",
            piece=field.name,
            layers=(0,),
            words=-(-field.size_bytes // 8),
        )
        for field in metadata_fields(shape.hidden_size)
        if field.name not in PLAIN_FIELDS
    )
    return (*rows, *fields)


def _of_buffer(shape: ModelShape, spec: SpaceSpec, buffer: BufferSpec) -> list[RowSites]:
    if buffer.rows is Granularity.PAGE:
        return [
            RowSites(
                space=spec.name,
                buffer=buffer.name,
                piece=piece.name,
                layers=spec.layers,
                words=piece.size_bytes // 4 if piece.size_bytes % 8 else piece.size_bytes // 8,
                is_half=bool(piece.size_bytes % 8),
            )
            for piece in buffer.pieces
        ]
    heads = shape.ssm_heads if buffer.rows is Granularity.SLOT else shape.num_kv_heads
    return [
        RowSites(
            space=spec.name,
            buffer=buffer.name,
            piece="",
            layers=spec.layers,
            words=buffer.row_bytes // 8,
            heads=heads if heads == buffer.shards else 1,
        )
    ]
