"""Rows of content words in one pass: fill them, find the rows that differ and their words' owners, and digest them.

rows: [T, W], codes: [T], mask: [W]; word w of row t is to be codes[t] XOR mask[w]. Rows of int32 hold the low halves.
The digest is that of all words in order, as kernels/digest defines it; only int64 rows have one.

Invariants:
- A verdict names the first differing word of all rows in order. It does not depend on how the work is split.
- Nothing here waits for a device. The result stays there until somebody reads it.
- The blocked, compiled and device forms give bit for bit what the torch forms give.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import cast

import torch

from kvcheck.kernels.compilers import asks_numba, asks_triton
from kvcheck.kernels.content import as_signed, differing_torch, low_half, rows_torch, unmix64_torch
from kvcheck.kernels.digest import combined, digest, digest_torch, start_of

BLOCK_BYTES = 512 << 10
"""Expected rows that the blocked form makes at a time: they stay in the second-level cache until they are compared."""

NONE = (1 << 63) - 1
"""In place of the number of a word: none differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowsSeen:
    """The result of a pass over rows, on their device.

    differing: bool [T]. first: int64 [4], of the first word that differs: its row, its place in it, the word, and the
    packed tag that it carries at that place (0 for halves, which do not say); -1, -1, 0, 0 where no word differs.
    digest: int64 scalar, or None if no key was given.
    """

    differing: torch.Tensor
    first: torch.Tensor
    digest: torch.Tensor | None


def fill_torch(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, *, key: int | None = None, first: int = 0
) -> torch.Tensor | None:
    """Write every word. With a key: the digest of what was written."""
    _check(rows, codes, mask, key)
    rows.copy_(rows_torch(codes, mask, rows.dtype))
    return None if key is None else digest_torch(rows.reshape(-1), key=key, first=first)


def fill(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, *, key: int | None = None, first: int = 0
) -> torch.Tensor | None:
    """fill_torch in one pass."""
    _check(rows, codes, mask, key)
    start = None if key is None else start_of(key, first)
    if kernels := _kernels(rows):
        parts = kernels.fill_triton(rows, codes, mask, None if start is None else as_signed(start))
        return None if parts is None else combined(parts)
    if rows.device.type != "cpu":
        return fill_torch(rows, codes, mask, key=key, first=first)
    if start is not None and asks_numba(rows):
        from kvcheck.kernels.content_rows_numba import fill_digest_numba

        return fill_digest_numba(rows, codes, mask, start)
    if rows.dtype == torch.int32:
        codes, mask = low_half(codes), low_half(mask)
    torch.bitwise_xor(codes.unsqueeze(-1), mask, out=rows)  # reads almost nothing, so it runs at the speed of memory
    # writes
    return None if key is None else digest(rows.reshape(-1), key=key, first=first)


def verify_torch(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, *, key: int | None = None, first: int = 0
) -> RowsSeen:
    """Compare every word with the one expected there. With a key: the digest of what was seen."""
    _check(rows, codes, mask, key)
    wrong = rows != rows_torch(codes, mask, rows.dtype)
    return RowsSeen(
        differing=wrong.any(-1),
        first=_first_torch(wrong, rows, mask),
        digest=None if key is None else digest_torch(rows.reshape(-1), key=key, first=first),
    )


def verify(
    rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, *, key: int | None = None, first: int = 0
) -> RowsSeen:
    """verify_torch in one pass."""
    _check(rows, codes, mask, key)
    start = None if key is None else start_of(key, first)
    if kernels := _kernels(rows):
        wrong, found, parts = kernels.verify_triton(rows, codes, mask, None if start is None else as_signed(start))
        total = None if parts is None else combined(parts)
        return RowsSeen(differing=wrong, first=_first_of(found, rows), digest=total)
    if rows.device.type != "cpu":
        return verify_torch(rows, codes, mask, key=key, first=first)
    if asks_numba(rows):
        from kvcheck.kernels.content_rows_numba import verify_numba

        wrong, is_any, total = verify_numba(rows, codes, mask, start)
    else:
        wrong = _differing_blocks(rows, codes, mask)
        is_any = bool(wrong.any())
        total = None if key is None else digest(rows.reshape(-1), key=key, first=first)
    seen = _first_on_host(wrong, rows, codes, mask) if is_any else torch.tensor((-1, -1, 0, 0))
    return RowsSeen(differing=wrong, first=seen, digest=total)


def differing(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """differing_torch, rows: [..., W], codes: [...], in one pass over much memory."""
    if rows.device.type == "cpu" and rows.numel() * rows.element_size() <= BLOCK_BYTES:
        return differing_torch(rows, codes, mask)  # one block of its own
    flat, per_row = rows.reshape(-1, rows.shape[-1]), codes.reshape(-1)
    if kernels := _kernels(rows):
        return cast(torch.Tensor, kernels.verify_triton(flat, per_row, mask, None)[0]).view(codes.shape)
    if rows.device.type != "cpu":
        return differing_torch(rows, codes, mask)
    return verify(flat, per_row, mask).differing.view(codes.shape)


def _kernels(rows: torch.Tensor) -> ModuleType | None:
    """The module of the kernels where they run: on a device, and on the CPU where triton is loaded and interprets."""
    if not asks_triton(rows):
        return None
    from kvcheck.kernels import content_rows_triton

    return content_rows_triton if rows.is_cuda or content_rows_triton.IS_INTERPRETED else None


def _first_torch(wrong: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    words = rows.reshape(-1)
    if not len(words):
        return _first_of(words.new_empty((0, 3), dtype=torch.int64), rows)
    at = wrong.reshape(-1).to(torch.int8).argmax().view(1)  # the first of the largest
    word = words.index_select(0, at).to(torch.int64)
    tag = unmix64_torch(word ^ mask.index_select(0, at % len(mask)))
    return _first_of(torch.stack((torch.where(wrong.any(), at, NONE), word, tag), 1), rows)


def _first_of(found: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`first` of RowsSeen from candidates [n, 3]: number of the word or NONE, the word, the tag it carries."""
    if not len(found):
        return torch.arange(4, device=rows.device).ge(2).to(torch.int64) - 1
    at, word, tag = found.index_select(0, found[:, 0].argmin(0, keepdim=True)).view(3)
    is_none, wide = at == NONE, rows.shape[1]
    row, place = torch.where(is_none, -1, at // wide), torch.where(is_none, -1, at % wide)
    owner = torch.where(is_none, 0, tag) if rows.dtype == torch.int64 else torch.zeros_like(tag)
    return torch.stack((row, place, torch.where(is_none, 0, word), owner))


def _first_on_host(
    differing: torch.Tensor, rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`first` of RowsSeen, found by reading the rows that differ (at least one) again."""
    at = int(differing.to(torch.int8).argmax())
    row = slice(at, at + 1)
    first = _first_torch(rows[row] != rows_torch(codes[row], mask, rows.dtype), rows[row], mask)
    first[0] = at
    return first


def _differing_blocks(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Which rows of CPU memory differ: [T] bool. Only a block that differs is compared word by word."""
    differing = torch.zeros(len(rows), dtype=torch.bool)
    if not rows.numel():
        return differing
    if rows.dtype == torch.int32:
        codes, mask = low_half(codes), low_half(mask)
    rows = rows.contiguous()
    row_bytes = rows.shape[1] * rows.element_size()
    step = min(len(rows), max(1, BLOCK_BYTES // row_bytes))
    # Python compares two byte strings by memcmp, which makes no mask. Every torch comparison makes one.
    memory = bytearray(step * row_bytes)
    block, seen = torch.frombuffer(memory, dtype=rows.dtype).view(step, -1), rows.numpy()
    for at in range(0, len(rows), step):
        part = rows[at : at + step]
        expected = torch.bitwise_xor(codes[at : at + step, None], mask, out=block[: len(part)])
        wanted = memory if len(part) == step else memory[: len(part) * row_bytes]
        if wanted != seen[at : at + step].data:
            differing[at : at + step] = (part != expected).any(-1)
    return differing


def _check(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor, key: int | None) -> None:
    assert rows.ndim == 2 and codes.shape == rows.shape[:1] and mask.shape == rows.shape[1:], (
        f"rows are [T, W], codes [T], mask [W], got {[*rows.shape]}, {[*codes.shape]}, {[*mask.shape]}"
    )
    assert rows.dtype in (torch.int64, torch.int32) and codes.dtype == mask.dtype == torch.int64, "integer words"
    assert key is None or rows.dtype == torch.int64, "only rows of 64-bit words have a digest"
