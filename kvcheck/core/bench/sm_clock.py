"""The clock rate of a GPU's multiprocessors, read from the driver's management library (NVML)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

LIBRARY = "libnvidia-ml.so.1"
"""Part of the driver."""
OF_MULTIPROCESSORS = 1
"""NVML_CLOCK_SM of nvml.h."""


def sm_clock_mhz(uuid: str, open_library: Callable[[str], Any] = ctypes.CDLL) -> int | str:
    """Return the current MHz of the GPU with that uuid (without "GPU-"), or the reason why it is unknown."""
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
