"""AOT kernels: the functions of `sgl_kernel.kvcacheio` in Python, as lists of byte copies.

Names and parameters are those of the compiled functions. Calls that those refuse raise CopyRefused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.sglang.rig.byte_copies import (
    ByteCopy,
    CopyRefused,
    Pieces,
    by_head,
    head_first,
    moved,
    pages,
    paired,
    rows,
    runs,
)


def per_layer(
    *,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    src_k: torch.Tensor | None = None,
    dst_k: torch.Tensor | None = None,
    src_v: torch.Tensor | None = None,
    dst_v: torch.Tensor | None = None,
    src: torch.Tensor | None = None,
    dst: torch.Tensor | None = None,
    layer_id: int = 0,
    src_layout_dim: int = 0,
    page_size: int = 1,
    head_num: int = 0,
    block_quota: int = 0,
    num_warps_per_block: int = 0,
) -> Pieces:
    """To the device, from memory of one layer, from items with all layers, or from heads of pages."""
    _words(item_size)
    pairs, done = paired(src_indices, dst_indices), []
    for source, target in ((src_k, dst_k), (src_v, dst_v), (src, dst)):
        if source is None or target is None:
            continue
        start, end = source.data_ptr(), target.data_ptr()
        if head_num:
            heads = head_first(start, src_layout_dim, item_size, page_size=page_size, heads=head_num)
            into, size = by_head(end, item_size, head_num), item_size // head_num
            done += moved(heads, into, pairs, layer=layer_id, size=size)
        else:
            whole = pages(start, src_layout_dim, item_size) if src_layout_dim else rows(start, item_size)
            done += moved(whole, rows(end, item_size), pairs, layer=layer_id, size=item_size)
    return [done]


def all_layers(
    *,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    src_k_layers: torch.Tensor | None = None,
    dst_k_layers: torch.Tensor | None = None,
    src_v_layers: torch.Tensor | None = None,
    dst_v_layers: torch.Tensor | None = None,
    src_layers: torch.Tensor | None = None,
    dst_layers: torch.Tensor | None = None,
    dst_k: torch.Tensor | None = None,
    dst_v: torch.Tensor | None = None,
    dst: torch.Tensor | None = None,
    dst_layout_dim: int = 0,
    page_size: int = 1,
    head_num: int = 0,
    block_quota: int = 0,
    num_warps_per_block: int = 0,
) -> Pieces:
    """From the device, by a table of addresses, to such a table, to items, or to heads of pages."""
    _words(item_size)
    pairs = paired(src_indices, dst_indices)
    done: list[list[ByteCopy]] = [[] for _ in range(num_layers)]
    buffers = (
        (src_k_layers, dst_k_layers, dst_k),
        (src_v_layers, dst_v_layers, dst_v),
        (src_layers, dst_layers, dst),
    )
    for source, table, memory in buffers:
        if source is None:
            continue
        if len(source) != num_layers:
            raise CopyRefused(f"{len(source)} addresses for {num_layers} layers")
        for layer, start in enumerate(source.tolist()):
            if table is not None:
                into = rows(int(table[layer]), item_size)
            elif head_num:
                into = head_first(_first(memory), dst_layout_dim, item_size, page_size=page_size, heads=head_num)
            else:
                into = pages(_first(memory), dst_layout_dim, item_size)
            from_ = by_head(start, item_size, head_num) if head_num else rows(start, item_size)
            done[layer] += moved(from_, into, pairs, layer=layer, size=item_size // (head_num or 1))
    return done


def direct(
    *,
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> Pieces:
    _whole_pages(src_indices, page_size)
    if len(src_layers) != len(dst_layers):
        raise CopyRefused(f"{len(src_layers)} and {len(dst_layers)} layers")
    pieces = []
    for source, target in zip(src_layers, dst_layers, strict=True):
        size = _row(target)
        if _row(source) != size:
            raise CopyRefused(f"rows of {_row(source)} and {size} bytes")
        found = runs(paired(src_indices, dst_indices))
        start, end = source.data_ptr(), target.data_ptr()
        pieces.append([ByteCopy(start + one * size, end + other * size, count * size) for one, other, count in found])
    return pieces


def direct_to_layer(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> Pieces:
    """The first index of a page names the page."""
    _whole_pages(src_indices, page_size)
    each = len(dst_ptrs) // len(src_ptrs)
    pieces = []
    for at, target in enumerate(dst_ptrs):
        memory, size = src_ptrs[at // each], _row(target)
        first = paired(src_indices, dst_indices)[::page_size]
        parts = [(_part(memory, one // page_size, layer_id + at % each), other) for one, other in first]
        pieces.append([ByteCopy(part, target.data_ptr() + other * size, page_size * size) for part, other in parts])
    return pieces


def direct_to_pages(
    *,
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> Pieces:
    """The first index of a page names the page."""
    _whole_pages(src_indices, page_size)
    each = len(src_ptrs) // len(dst_ptrs)
    pieces = []
    for at, source in enumerate(src_ptrs):
        memory, size = dst_ptrs[at // each], _row(source)
        first = paired(src_indices, dst_indices)[::page_size]
        parts = [(one, _part(memory, other // page_size, at % each)) for one, other in first]
        pieces.append([ByteCopy(source.data_ptr() + one * size, part, page_size * size) for one, part in parts])
    return pieces


AOT_KERNELS: Final[dict[str, Callable[..., Pieces]]] = {
    "transfer_kv_per_layer": per_layer,
    "transfer_kv_per_layer_mla": per_layer,
    "transfer_kv_per_layer_pf_lf": per_layer,
    "transfer_kv_per_layer_mla_pf_lf": per_layer,
    "transfer_kv_per_layer_ph_lf": per_layer,
    "transfer_kv_all_layer": all_layers,
    "transfer_kv_all_layer_mla": all_layers,
    "transfer_kv_all_layer_lf_pf": all_layers,
    "transfer_kv_all_layer_mla_lf_pf": all_layers,
    "transfer_kv_all_layer_lf_ph": all_layers,
    "transfer_kv_direct": direct,
    "transfer_kv_per_layer_direct_pf_lf": direct_to_layer,
    "transfer_kv_all_layer_direct_lf_pf": direct_to_pages,
}


def _words(item_size: int) -> None:
    if item_size % 8:
        raise CopyRefused(f"items of {item_size} bytes, which 8 does not divide")


def _whole_pages(indices: torch.Tensor, page_size: int) -> None:
    if indices.numel() % page_size:
        raise CopyRefused(f"{indices.numel()} indices for pages of {page_size}")


def _first(memory: torch.Tensor | None) -> int:
    if memory is None:
        raise CannotDrive("a copy of all layers is given neither a table nor memory to copy to")
    return memory.data_ptr()


def _row(memory: torch.Tensor) -> int:
    if not memory.is_contiguous():
        text = f"rows of {list(memory.shape)} lie {list(memory.stride())} apart, which no direct copy here can do"
        raise CannotDrive(text)
    return memory.stride(0) * memory.element_size()


def _part(memory: torch.Tensor, page: int, layer: int) -> int:
    if not (0 <= page < memory.shape[0] and 0 <= layer < memory.shape[1]):
        raise CopyRefused(f"layer {layer} of page {page} of {list(memory.shape[:2])}")
    return memory[page, layer].data_ptr()
