"""Which optional compiler an operation asks for: triton for device tensors, numba for much memory of the host.

Invariants:
- Neither library is imported here: both take long to import, and work that needs none of them does not load them.
- What is chosen changes how fast a result comes, never the result.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import cache

import torch

MANY_BYTES = 4 << 20
"""From here on a pass over host memory is worth loading numba and compiling a loop."""


def asks_triton(*tensors: torch.Tensor) -> bool:
    """Whether to ask for the triton form: on a device where triton is installed, on the CPU where it is loaded.

    On the CPU the form also has to be interpreted, which the module that holds it knows.
    """
    if any(tensor.is_cuda for tensor in tensors):
        return _is_installed("triton")
    return "triton" in sys.modules


def asks_numba(tensor: torch.Tensor) -> bool:
    """Whether to ask for the numba form of a pass over a CPU tensor: once it is loaded, for every size."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    return "numba" in sys.modules or asks_numba_of(tensor.numel() * tensor.element_size())


def asks_numba_of(size: int) -> bool:
    """Whether a pass over so many bytes of the host asks for the numba form, loaded or not."""
    return size >= MANY_BYTES and _is_installed("numba")


@cache
def _is_installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
