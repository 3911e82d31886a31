"""Content words: fill rows with words that encode their owner, and find the rows that differ.

word[row, w] = mix64(tag[row]) XOR mask[w]. The caller passes mix64(tag) as `codes`.

Invariants:
- Everything is 64-bit integer arithmetic that wraps; no word ever passes through a float.
- The 32-bit form keeps the low half of each 64-bit word.
"""

from __future__ import annotations

import torch

_M1 = 0xBF58476D1CE4E5B9
_M2 = 0x94D049BB133111EB
_U64 = (1 << 64) - 1
_M1_INVERSE = pow(_M1, -1, 1 << 64)
_M2_INVERSE = pow(_M2, -1, 1 << 64)


def as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def as_unsigned(value: int) -> int:
    return value & _U64


def mix64_int(value: int) -> int:
    """The splitmix64 finaliser (Steele, Lea and Flood, 2014) of one unsigned 64-bit value: a bijection."""
    value = ((value ^ (value >> 30)) * _M1) & _U64
    value = ((value ^ (value >> 27)) * _M2) & _U64
    return value ^ (value >> 31)


def unmix64_int(value: int) -> int:
    value ^= (value >> 31) ^ (value >> 62)
    value = (value * _M2_INVERSE) & _U64
    value ^= (value >> 27) ^ (value >> 54)
    value = (value * _M1_INVERSE) & _U64
    return value ^ (value >> 30) ^ (value >> 60)


def mix64_torch(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shift(values, 30)) * as_signed(_M1)
    values = (values ^ _shift(values, 27)) * as_signed(_M2)
    return values ^ _shift(values, 31)


def unmix64_torch(values: torch.Tensor) -> torch.Tensor:
    values = (values ^ _shift(values, 31) ^ _shift(values, 62)) * as_signed(_M2_INVERSE)
    values = (values ^ _shift(values, 27) ^ _shift(values, 54)) * as_signed(_M1_INVERSE)
    return values ^ _shift(values, 30) ^ _shift(values, 60)


def rows_torch(codes: torch.Tensor, mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of words. codes: [..., T] int64; mask: [W] int64. Returns [..., T, W] int64 or int32."""
    words = codes.unsqueeze(-1) ^ mask
    return words if dtype == torch.int64 else low_half(words)


def low_half(words: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 words, as int32 with the same bits."""
    whole = words.contiguous()
    if whole.stride(-1) != 1:  # torch calls a single word contiguous with any stride, and then cannot view it
        whole = words.clone(memory_format=torch.contiguous_format)
    return whole.view(torch.int32)[..., ::2]


def differing_torch(rows: torch.Tensor, codes: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Rows that differ from their expected words, bool [...]. rows: [..., W]; codes: [...]."""
    expected = rows_torch(codes, mask, rows.dtype)
    if rows.device.type == "cpu" and torch.equal(rows, expected):
        return torch.zeros(codes.shape, dtype=torch.bool)  # the usual case is one comparison without a mask
    return (rows != expected).any(-1)


def _shift(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)
