"""JIT kernels: the copies that newer releases compile at run time and prefer on a device, in Python.

Rows are a stride of their tensor apart; for addresses in tables the stride is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from kvcheck.core.probes.sglang.rig.byte_copies import ByteCopy, CopyRefused, Pieces, moved, paired, rows


def one_layer(
    *,
    indices_dst: torch.Tensor,
    indices_src: torch.Tensor,
    k_cache_dst: torch.Tensor | None = None,
    v_cache_dst: torch.Tensor | None = None,
    k_cache_src: torch.Tensor | None = None,
    v_cache_src: torch.Tensor | None = None,
    cache_dst: torch.Tensor | None = None,
    cache_src: torch.Tensor | None = None,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> Pieces:
    pairs, done = paired(indices_src, indices_dst), []
    for source, target in ((k_cache_src, k_cache_dst), (v_cache_src, v_cache_dst), (cache_src, cache_dst)):
        if source is not None and target is not None:
            dim = element_dim or target.size(-1)
            one, other = source.view(-1, dim), target.view(-1, dim)
            places = [rows(each.data_ptr(), each.stride(0) * each.element_size()) for each in (one, other)]
            done += moved(places[0], places[1], pairs, layer=0, size=dim * target.element_size())
    return [done]


def all_layers(
    *,
    indices_dst: torch.Tensor,
    indices_src: torch.Tensor,
    k_ptr_dst: torch.Tensor | None = None,
    v_ptr_dst: torch.Tensor | None = None,
    k_ptr_src: torch.Tensor | None = None,
    v_ptr_src: torch.Tensor | None = None,
    ptr_dst: torch.Tensor | None = None,
    ptr_src: torch.Tensor | None = None,
    kv_cache_src_stride_bytes: int = 0,
    kv_cache_dst_stride_bytes: int = 0,
    cache_src_stride_bytes: int = 0,
    cache_dst_stride_bytes: int = 0,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> Pieces:
    start_apart = kv_cache_src_stride_bytes or cache_src_stride_bytes
    end_apart = kv_cache_dst_stride_bytes or cache_dst_stride_bytes
    pairs = paired(indices_src, indices_dst)
    done: list[list[ByteCopy]] = []
    for source, target in ((k_ptr_src, k_ptr_dst), (v_ptr_src, v_ptr_dst), (ptr_src, ptr_dst)):
        if source is not None and target is not None:
            for start, end in zip(source.tolist(), target.tolist(), strict=True):
                size = element_size or end_apart
                done.append(moved(rows(start, start_apart), rows(end, end_apart), pairs, layer=0, size=size))
    return done


def staged(
    *,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
    k_ptr_src: torch.Tensor | None = None,
    v_ptr_src: torch.Tensor | None = None,
    ptr_src: torch.Tensor | None = None,
    staging_k: torch.Tensor | None = None,
    staging_v: torch.Tensor | None = None,
    staging: torch.Tensor | None = None,
    dst_k: torch.Tensor | None = None,
    dst_v: torch.Tensor | None = None,
    dst: torch.Tensor | None = None,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> Pieces:
    """Gather pages in the staging memory, then copy them whole. The first index of a page names the page."""
    if src_indices.numel() % page_size:
        raise CopyRefused(f"{src_indices.numel()} indices for pages of {page_size}")
    first = paired(src_indices, dst_indices)[::page_size]
    done: list[list[ByteCopy]] = []
    for table, between, into in ((k_ptr_src, staging_k, dst_k), (v_ptr_src, staging_v, dst_v), (ptr_src, staging, dst)):
        if table is None or between is None or into is None:
            continue
        item = element_size or between[0, 0].numel() * between.element_size()
        token = item * len(table)
        if between.stride(0) * between.element_size() != token or into.stride(0) * into.element_size() != token:
            raise CopyRefused(f"tokens of {token} bytes over rows of {list(between.shape)} and {list(into.shape)}")
        room = between.shape[0] // page_size
        for begin in range(0, len(first), room):
            chunk = first[begin : begin + room]
            gathered, copied = [], []
            for at, (one, other) in enumerate(chunk):
                for row in range(page_size):
                    held = between.data_ptr() + (at * page_size + row) * token
                    gathered += [
                        ByteCopy(start + (one + row) * item, held + layer * item, item)
                        for layer, start in enumerate(table.tolist())
                    ]
                held = between.data_ptr() + at * page_size * token
                copied.append(ByteCopy(held, into.data_ptr() + other * token, page_size * token))
            done += [gathered, copied]
    return done


_KERNELS: Final[dict[str, Callable[..., Pieces]]] = {
    "transfer_hicache_one_layer": one_layer,
    "transfer_hicache_one_layer_mla": one_layer,
    "transfer_hicache_all_layer": all_layers,
    "transfer_hicache_all_layer_mla": all_layers,
    "transfer_hicache_all_layer_staged_lf_pf": staged,
    "transfer_hicache_all_layer_mla_staged_lf_pf": staged,
}
JIT_KERNELS: Final = {f"jit_{name}": call for name, call in _KERNELS.items()}
"""By the names under which host pools import them."""
