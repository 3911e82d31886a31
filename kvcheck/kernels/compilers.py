"""Compilers: decides whether an operation uses triton (device tensors) or numba (much host memory), both optional.

Invariants:
- Neither library is imported here. Both take long to import, and work that needs none of them does not load them.
- The choice changes the speed and never the result.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import torch

MANY_BYTES = 4 << 20
"""From here on a pass over host memory is worth loading numba and compiling a loop."""

GRID_FIRST, GRID_OTHERS = (1 << 31) - 1, 65_535
"""Programs that a device starts in the first dimension of a launch, and in each other one."""


def asks_triton(*tensors: torch.Tensor) -> bool:
    """True if the triton form may be used: on a device if triton is installed, on the CPU if it is loaded.

    On the CPU triton also has to interpret the kernel. The module of the kernel checks that.
    """
    if any(tensor.is_cuda for tensor in tensors):
        return _is_installed("triton")
    return "triton" in sys.modules


def grid_of(first: int, second: int = 1, third: int = 1) -> tuple[int, int, int]:
    """The programs of a launch. Raises ValueError for more than a CUDA device starts.

    The bounds are those of the CUDA C++ Programming Guide: 2**31 - 1 in the first dimension, 65,535 in the others.
    """
    for count, most in ((first, GRID_FIRST), (second, GRID_OTHERS), (third, GRID_OTHERS)):
        if count > most:
            raise ValueError(f"a launch of {count:,} programs in one dimension; a device has {most:,}: split the call")
    return first, second, third


def asks_numba(tensor: torch.Tensor) -> bool:
    """True if a pass over a CPU tensor uses the numba form. Once numba is loaded, every size does."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return "numba" in sys.modules or asks_numba_of(tensor.numel() * tensor.element_size())


def asks_numba_of(size: int) -> bool:
    """True if a pass over so many bytes of host memory uses the numba form, also if numba is not loaded yet."""
    return size >= MANY_BYTES and _is_installed("numba")


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
