"""Sizes: what is allocated, compared with the model's dimensions, and copies of more rows than one chunk has.

Invariants:
- What is expected follows from the shape's numbers alone. The tables of buffers and of fields are what is judged.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch

from kvcheck.core.base.paging import pages_for
from kvcheck.core.cache.offload import CHUNK_ROWS
from kvcheck.core.cache.pools.buffers import BufferSet, Granularity
from kvcheck.core.cache.pools.pool import Holding, KVPool
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.core.targets.misuse.call import NOT_NOW, Attempt, Misuse, on_each
from kvcheck.core.targets.misuse.scene import PAGES, Scene, varied

SCALE_BYTES = 4
"""A scale is one fp32."""


FIELD_BYTES = {
    "output_ids": 64,
    "cached_tokens": 64,
    "output_token_logprobs_val": 64,
    "output_token_logprobs_idx": 64,
    "output_top_logprobs_val": 512,
    "output_top_logprobs_idx": 512,
    "output_topk_p": 64,
    "output_topk_index": 128,
    "output_hidden_states": 0,
    "bootstrap_room": 64,
}
"""Bytes of each field of a metadata row, in their order. Hidden states have as many as the model says."""


def page_bytes(shape: ModelShape) -> dict[str, int]:
    """By buffer: bytes of one page of one attention layer."""
    size = shape.page_size
    rows: dict[str, int] = {}
    if shape.num_kv_heads:
        for name, dim in (("k", shape.head_dim), ("v", shape.v_head_dim or shape.head_dim)):
            elements = size * shape.num_kv_heads * dim
            rows[name] = elements * shape.kv_dtype.itemsize
            if shape.scale_block:
                rows[f"{name}_scale"] = elements // shape.scale_block * SCALE_BYTES
    else:
        rows["latent"] = size * (shape.latent_row_bytes or shape.latent_dim * shape.kv_dtype.itemsize)
    return rows


def unit_bytes(shape: ModelShape) -> dict[tuple[str, str], int]:
    """By space and buffer: bytes of one page or slot in all layers of the space."""
    pages = page_bytes(shape)
    needed: dict[tuple[str, str], int] = {}
    for space, layers in (("full", shape.full_layers), ("window", shape.window_layers)):
        needed |= {(space, name): len(layers) * each for name, each in pages.items() if layers}
    if shape.index_head_dim:
        token = shape.index_head_dim + shape.index_head_dim // shape.index_quant_block * SCALE_BYTES
        needed["full", "index_k_with_scale"] = len(shape.full_layers) * shape.page_size * token
    if shape.state_layers:
        kept = shape.conv_dim * (shape.conv_kernel - 1)  # the newest input is the token's own
        states = shape.ssm_heads * shape.ssm_key_dim * shape.ssm_value_dim
        needed["state", "conv"] = len(shape.state_layers) * kept * shape.conv_dtype.itemsize
        needed["state", "ssm"] = len(shape.state_layers) * states * shape.ssm_dtype.itemsize
    return needed


def _allocated(scene: Scene) -> bool:
    """Every buffer has the bytes that its layers and units need, one unit of padding included."""
    backend_bytes = scene.backend.allocated()
    for each in scene.pool.sets.values():
        ranges, total = each.storage_ranges(), 0
        for buffer in each.spec.buffers:
            needed = unit_bytes(scene.shape).get((each.spec.name, buffer.name), 0) * (each.units + 1)
            first, last = ranges[buffer.name]
            if not needed == last - first == backend_bytes[each.memory_name(buffer.name)]:
                return False
            total += needed
        if each.size_bytes() != total:
            return False
    return _names(scene.pool) == unit_bytes(scene.shape).keys()


def _names(pool: KVPool) -> set[tuple[str, str]]:
    return {(each.spec.name, buffer.name) for each in pool.sets.values() for buffer in each.spec.buffers}


def _apart(scene: Scene) -> bool:
    """No two buffers share a byte."""
    ranges = sorted(span for each in scene.pool.sets.values() for span in each.storage_ranges().values())
    return all(stop <= start for (_, stop), (start, _) in pairwise(ranges))


def _packed(scene: Scene) -> object:
    """The pieces of all tokens cover a page row, each byte once."""
    rows = [
        buffer for each in scene.pool.sets.values() for buffer in each.spec.buffers if buffer.rows is Granularity.PAGE
    ]
    if not rows:
        return NOT_NOW
    for buffer in rows:
        spans = sorted(
            (start, start + piece.size_bytes)
            for piece in buffer.pieces
            for start in range(piece.offset, piece.offset + scene.page * piece.size_bytes, piece.size_bytes)
        )
        edges = [0, *(stop for _, stop in spans)]
        if [start for start, _ in spans] != edges[:-1] or edges[-1] != buffer.row_bytes:
            return False
    return True


def _fields(scene: Scene) -> bool:
    """The fields of a metadata row lie side by side, at multiples of 8 bytes."""
    hidden, at = scene.shape.hidden_size, 0
    fields = metadata_fields(hidden)
    for field, (name, count) in zip(fields, FIELD_BYTES.items(), strict=True):
        size = count or 4 * hidden
        if (field.name, field.offset, field.size_bytes) != (name, at, size):
            return False
        at += -(-size // 8) * 8
    return True


def _scarcest(scene: Scene) -> object:
    """A pool with fewer window pages than others has as many pages to give as that space."""
    if not scene.pool.has_window:
        return NOT_NOW
    return scene.make_pool(varied(scene.sizes, window_pages=PAGES - 2)).pages_free == PAGES - 2


def _in_chunks(scene: Scene) -> bool:
    """A request of more rows than one chunk copies is saved and comes back whole, in other rows."""
    tokens = CHUNK_ROWS + scene.page + 1
    pages = 2 * pages_for(tokens, scene.page)
    window = pages if scene.pool.has_window else 0
    pool = scene.make_pool(
        varied(scene.sizes, pages=pages, requests=2, max_tokens=pages * scene.page, window_pages=window)
    )
    offload = scene.parts.offload(pool, pool.backend)
    saved, restored = _of_tokens(pool, tokens), _of_tokens(pool, tokens)
    for each in pool.sets.values():
        for buffer in each.spec.buffers:
            _number(each, buffer.name)
    value = offload.save(saved)
    offload.restore(value, restored)
    offload.discard(value)
    return all(
        torch.equal(_rows_of(pool, saved, space, name), _rows_of(pool, restored, space, name))
        for space, name in sorted(_names(pool))
    )


def _of_tokens(pool: KVPool, tokens: int) -> Holding:
    """A holding of request 1 with so many tokens."""
    holding = pool.open(1)
    assert holding is not None and pool.grow(holding, tokens, query=0)
    pool.commit(holding, tokens)
    return holding


def _number(owned: BufferSet, name: str) -> None:
    """No two words of the buffer are alike."""
    view = owned.write_view(name)
    view.copy_(torch.from_numpy(np.arange(view.numel(), dtype=np.int64)).view(view.shape))


def _rows_of(pool: KVPool, holding: Holding, space: str, name: str) -> torch.Tensor:
    """The words of a request in one buffer, in logical order."""
    owned = pool.sets[space]
    rows = pool.extent(holding, holding.committed).rows(space, owned.buffer(name))
    return owned.read_view(name, range(len(owned.spec.layers)), pool.forward)[:, torch.from_numpy(rows)]


def _two_offloads(scene: Scene) -> bool:
    """Values that two Offloads keep on one backend do not take each other's memory."""
    first = scene.saved
    second = scene.parts.offload(scene.pool, scene.backend)
    value = second.save(scene.two)
    is_apart = not {each.memory for each in value.buffers} & {each.memory for each in first.buffers}
    second.discard(value)
    return is_apart


SIZES: tuple[Misuse[Scene], ...] = (
    Misuse("the bytes of every buffer", None, _allocated),
    Misuse("the addresses of all buffers", None, _apart),
    Misuse("the pieces of page rows", None, _packed),
    Misuse("the fields of a metadata row", None, _fields),
    Misuse("the pages that the scarcest space can give", None, _scarcest),
    Misuse("save and restore of more rows than a chunk has", None, _in_chunks),
    Misuse("save with a second Offload on the same backend", None, _two_offloads),
)


def size_attempts(scene: Scene) -> list[Attempt]:
    """Of the scene's pool, and of larger ones."""
    return on_each(SIZES, scene, Scene.kept)
