"""The clock rate of a GPU's multiprocessors, as the driver's library of management functions (NVML) tells it.

Invariants:
- What is not told is a reason in words, never a number.
- No process is started, and no setting of the device is read or changed but this one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
"""It comes with the driver."""
OF_MULTIPROCESSORS = 1
"""NVML_CLOCK_SM of nvml.h."""


def sm_clock_mhz(uuid: str, open_library: Callable[[str], Any] = ctypes.CDLL) -> int | str:
    """MHz now of the GPU with that uuid, without "GPU-" before it; or why nobody knows."""
    try:
        nvml = open_library(LIBRARY)
    except OSError as error:
        return f"UNKNOWN: {LIBRARY} does not open ({error}); next: nvidia-smi -q -d CLOCK"
    device, mhz = ctypes.c_void_p(), ctypes.c_uint()
    steps: tuple[tuple[str, tuple[object, ...]], ...] = (
        ("nvmlInit_v2", ()),
        ("nvmlDeviceGetHandleByUUID", (f"GPU-{uuid}".encode(), ctypes.byref(device))),
        ("nvmlDeviceGetClockInfo", (device, OF_MULTIPROCESSORS, ctypes.byref(mhz))),
    )
    for name, arguments in steps:
        if code := getattr(nvml, name)(*arguments):
            return f"UNKNOWN: {name} returned {code}; next: nvidia-smi -q -d CLOCK"
    return mhz.value
