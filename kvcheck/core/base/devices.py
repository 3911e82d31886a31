"""Devices by name.

- cpu: one process decides the order of operations.
- threads: streams are threads of this process, on its memory.
- cuda, cuda:N: streams of a GPU.
"""

from __future__ import annotations

from kvcheck.core.base.errors import UsageError

KINDS = ("cpu", "threads", "cuda")
STREAMED = frozenset({"threads", "cuda"})
"""Backends, and kinds of devices, whose work runs beside the process."""

DRIVER = "libcuda.so.1"
"""The library that comes with the driver of a GPU."""

CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
"""Hardware queues of a device, the most that CUDA has: lanes that share one wait for each other's holds. It counts if
it is set before the process first uses the device."""


def kind_of(device: str) -> str:
    kind, colon, number = device.partition(":")
    if kind not in KINDS or (colon and not (kind == "cuda" and number.isascii() and number.isdigit())):
        raise UsageError(f"--device: expected cpu, threads, cuda or cuda:N, got {device!r}")
    return kind


def number_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)
