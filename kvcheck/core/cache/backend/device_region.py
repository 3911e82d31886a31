"""DeviceRegion: memory of a CUDA device that another process maps by a CUDA IPC handle, and the backend over it.

Invariants:
- A handle travels as hexadecimal, and is never executed or unpickled.
- Memory is freed with the process that made it, because a process that has mapped it may still write it before.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvcheck.core.base.cells import DRIVER
from kvcheck.core.base.errors import TransferError, UnknownVerdict
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.base.record import value_from
from kvcheck.core.cache.backend.backend import Footprint, Lane, Operation, Signal
from kvcheck.core.cache.backend.cuda import cuda_device
from kvcheck.core.cache.backend.region_backend import Region, RegionBackend

HANDLE_BYTES = 64
BLOCK_BYTES = 2 << 20
"""The driver puts smaller allocations into one block, and a handle would share the whole block."""
LAZY_PEER_ACCESS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the one flag that the driver takes."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceHandle:
    """memory: in hexadecimal. device: its number, the same in all ranks of a run."""

    memory: str
    device: int
    size_bytes: int


class _Bytes:
    """An address as torch.as_tensor takes it."""

    def __init__(self, address: int, size_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class DeviceRegion:
    def __init__(self, size_bytes: int, device: torch.device) -> None:
        self.size_bytes = size_bytes
        self._device = device
        address = ctypes.c_void_p()
        with _context(device):
            whole = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
            _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(whole))
        self._address = address.value or 0

    @property
    def handle(self) -> DeviceHandle:
        """For `attach` in another process; the process that made it cannot attach it."""
        handle = _Handle()
        with _context(self._device):
            _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_void_p(self._address))
        return DeviceHandle(memory=bytes(handle).hex(), device=self._device.index, size_bytes=self.size_bytes)

    def bytes_view(self) -> torch.Tensor:
        return _view(self._address, self.size_bytes, self._device)


def attach(handle: DeviceHandle) -> torch.Tensor:
    """Map the region of another process, [bytes] uint8, on its own device. Raise ValueError, TransferError."""
    packed = bytes.fromhex(handle.memory)
    if len(packed) != HANDLE_BYTES or handle.size_bytes < 1:
        raise ValueError(f"expected {HANDLE_BYTES} bytes and a size, got {len(packed)} and {handle.size_bytes}")
    address = ctypes.c_void_p()
    device = cuda_device(handle.device)
    with _context(device):
        mapped = _Handle.from_buffer_copy(packed)
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), mapped, ctypes.c_uint(LAZY_PEER_ACCESS))
    return _view(address.value or 0, handle.size_bytes, device)


class DeviceRegionBackend(RegionBackend):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.device = cuda_device(index)
        torch.cuda.set_device(self.device)

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        signal = super().submit(operation, lane=lane, reads=reads, writes=writes, after=after)
        torch.cuda.current_stream(self.device).synchronize()
        return signal

    def index(self, values: IndexArray) -> torch.Tensor:  # type: ignore[override]
        return torch.from_numpy(values.copy()).to(self.device)

    def _make_region(self, size: int) -> Region:
        return DeviceRegion(size, self.device)

    def _map(self, raw: object) -> torch.Tensor:
        handle: DeviceHandle = value_from(DeviceHandle, raw, "region")
        return attach(handle)


@contextlib.contextmanager
def _context(device: torch.device) -> Iterator[None]:
    with torch.cuda.device(device):
        torch.empty(1, device=device)  # torch makes the context when it is first used
        yield


def _view(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    view = torch.as_tensor(_Bytes(address, size_bytes), device=device)
    if view.data_ptr() != address or view.device != device:  # torch copies memory of other devices
        raise TransferError(f"expected memory of {device} at {address:#x}, got {view.data_ptr():#x} on {view.device}")
    return view


def _call(name: str, *arguments: object) -> None:
    """Call the driver. Raise UnknownVerdict if it lacks the call, TransferError if the call fails."""
    try:
        code = getattr(ctypes.CDLL(DRIVER), name)(*arguments)
    except (OSError, AttributeError) as error:
        raise UnknownVerdict(f"CUDA IPC needs {name} of {DRIVER}: {error}; see `kvcheck doctor`") from error
    if code != 0:
        raise TransferError(f"{name} returned {code}, expected 0 (CUDA_SUCCESS)")
