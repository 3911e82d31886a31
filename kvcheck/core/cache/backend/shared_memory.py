"""Shared regions: memory that several processes of a machine map.

Invariants:
- A region has no name in a file system, so a killed process leaves nothing.
- Its size is sealed, so no process can shrink it while another uses it.
- A view stays valid after `close`. The mapping ends with the last tensor over it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from dataclasses import dataclass

import torch

from kvcheck.core.base.errors import TransferError, UsageError

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionHandle:
    """Identifies a region for processes of this machine and user while its holder lives."""

    name: str
    pid: int
    descriptor: int
    inode: int
    size_bytes: int


class SharedRegion:
    """`size_bytes` of zeroed memory."""

    def __init__(self, name: str, size_bytes: int) -> None:
        if not NAME.fullmatch(name):
            raise UsageError(f"not the name of a shared region: {name!r}; expected {NAME.pattern}")
        if size_bytes < 1:
            raise UsageError(f"shared region {name}: expected at least 1 byte, got {size_bytes}")
        self._open(name, os.memfd_create(f"kvcheck-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), size_bytes)

    def _open(self, name: str, descriptor: int, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._descriptor = descriptor
        try:
            if not os.fstat(descriptor).st_size:
                os.ftruncate(descriptor, size_bytes)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._map: mmap.mmap | None = mmap.mmap(descriptor, size_bytes)
        except OSError as error:
            os.close(descriptor)
            raise TransferError(f"shared region {name} of {size_bytes} bytes could not be mapped: {error}") from error

    @classmethod
    def attach(cls, handle: RegionHandle) -> SharedRegion:
        """Map the region. Raise TransferError if it is gone, or if its pid or descriptor was reused."""
        path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransferError(f"shared region {handle.name} of process {handle.pid} is gone: {error}") from error
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (handle.inode, handle.size_bytes):
            os.close(descriptor)
            raise TransferError(
                f"shared region {handle.name} of process {handle.pid} is gone: expected inode {handle.inode} of "
                f"{handle.size_bytes} bytes, found {found.st_ino} of {found.st_size}"
            )
        region = cls.__new__(cls)
        region._open(handle.name, descriptor, handle.size_bytes)
        return region

    @property
    def handle(self) -> RegionHandle:
        return RegionHandle(
            name=self.name,
            pid=os.getpid(),
            descriptor=self.fileno(),
            inode=os.fstat(self.fileno()).st_ino,
            size_bytes=self.size_bytes,
        )

    def fileno(self) -> int:
        if self._map is None:
            raise TransferError(f"shared region {self.name} is closed")
        return self._descriptor

    def bytes_view(self) -> torch.Tensor:
        """The memory itself, [size_bytes] uint8."""
        if self._map is None:
            raise TransferError(f"shared region {self.name} is closed")
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        if self._map is not None:
            self._map = None
            os.close(self._descriptor)

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
