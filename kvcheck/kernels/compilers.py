"""Choice between triton (device tensors), numba (much host memory) and torch. It changes the speed only."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import torch

MANY_BYTES = 4 << 20
"""Least bytes of host memory for which loading numba and compiling a loop pays."""

GRID_FIRST, GRID_OTHERS = (1 << 31) - 1, 65_535


def asks_triton(*tensors: torch.Tensor) -> bool:
    """True if the triton form may be used: on a device if triton is installed, on the CPU if it is loaded."""
    if any(tensor.is_cuda for tensor in tensors):
        return _is_installed("triton")
    return "triton" in sys.modules


def grid_of(first: int, second: int = 1, third: int = 1) -> tuple[int, int, int]:
    """Raise ValueError for more programs than a CUDA device starts (CUDA C++ Programming Guide)."""
    for count, most in ((first, GRID_FIRST), (second, GRID_OTHERS), (third, GRID_OTHERS)):
        if count > most:
            raise ValueError(f"a launch of {count:,} programs in one dimension; a device has {most:,}: split the call")
    return first, second, third


def asks_numba(tensor: torch.Tensor) -> bool:
    """True if a pass over a CPU tensor uses numba; once numba is loaded, every size does."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return "numba" in sys.modules or asks_numba_of(tensor.numel() * tensor.element_size())


def asks_numba_of(size: int) -> bool:
    return size >= MANY_BYTES and _is_installed("numba")


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
