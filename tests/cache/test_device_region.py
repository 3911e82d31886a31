"""Memory of a device that two processes map: what is asked of the driver, and what a handle may be."""

from __future__ import annotations

import contextlib
import ctypes
import json
from collections.abc import Iterator

import pytest
import torch

from kvcheck.core.base.errors import TransferError, UnknownVerdict
from kvcheck.core.base.record import to_plain
from kvcheck.core.cache.backend import device_region
from kvcheck.core.cache.backend.device_region import DeviceHandle, DeviceRegion, DeviceRegionBackend
from kvcheck.core.cache.backend.region_backend import RegionBackend

DEVICE = torch.device("cuda", 1)
ADDRESS = 0x7F00_0000_1000
MAPPED = 0x7F55_0000_0000
NAME = bytes(range(64))


class Driver:
    """libcuda.so.1. code: what every call returns. asked: names of the calls, with what matters of each."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.asked: list[tuple[object, ...]] = []

    def cuMemAlloc_v2(self, address: object, size: ctypes.c_size_t) -> int:
        self.asked.append(("alloc", size.value))
        address._obj.value = ADDRESS  # type: ignore[attr-defined]
        return self.code

    def cuIpcGetMemHandle(self, handle: object, address: ctypes.c_void_p) -> int:
        self.asked.append(("handle", address.value))
        ctypes.memmove(ctypes.addressof(handle._obj), NAME, len(NAME))  # type: ignore[attr-defined]
        return self.code

    def cuIpcOpenMemHandle_v2(self, address: object, handle: ctypes.Structure, flags: ctypes.c_uint) -> int:
        self.asked.append(("open", bytes(handle), flags.value))
        address._obj.value = MAPPED  # type: ignore[attr-defined]
        return self.code


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """A machine with two devices, whose context is current wherever it is asked for."""
    driver = Driver()

    @contextlib.contextmanager
    def context(device: torch.device) -> Iterator[None]:
        assert device == DEVICE
        yield

    monkeypatch.setattr(device_region, "_context", context)
    monkeypatch.setattr(device_region, "_view", lambda address, size, device: (address, size, device))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: {"libcuda.so.1": driver}[name])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return driver


def test_a_region_is_found_by_the_64_bytes_of_its_handle(driver: Driver) -> None:
    region = DeviceRegion(4096, DEVICE)
    said = json.loads(json.dumps(to_plain(region.handle)))
    assert said == {"memory": NAME.hex(), "device": 1, "size_bytes": 4096}
    found = device_region.attach(DeviceHandle(**said))
    assert found == (MAPPED, 4096, DEVICE)  # type: ignore[comparison-overlap]
    assert driver.asked == [("alloc", 2 << 20), ("handle", ADDRESS), ("open", NAME, 1)], "a whole block of the driver's"


GOOD = {"memory": NAME.hex(), "device": 1, "size_bytes": 8}


@pytest.mark.parametrize(
    "change",
    [{"memory": "00"}, {"memory": "zz"}, {"memory": 5}, {"size_bytes": 0}, {"pid": 5, "memory": None}],
)
def test_what_is_no_handle_never_reaches_the_driver(driver: Driver, change: dict[str, object]) -> None:
    backend = DeviceRegionBackend.__new__(DeviceRegionBackend)
    with pytest.raises(TransferError):
        backend.attach({**GOOD, **change})
    assert driver.asked == []
    with pytest.raises(TransferError, match="not the handle of a region"):
        RegionBackend().attach(GOOD)


def test_a_device_that_this_machine_lacks_is_unknown(driver: Driver) -> None:
    with pytest.raises(UnknownVerdict, match="has no device 7; expected 0 to 1"):
        device_region.attach(DeviceHandle(memory=NAME.hex(), device=7, size_bytes=8))


def test_a_call_that_fails_says_which_and_with_what(driver: Driver) -> None:
    driver.code = 801
    with pytest.raises(TransferError, match="cuMemAlloc_v2 returned 801, expected 0"):
        DeviceRegion(8, DEVICE)


def test_without_the_driver_it_is_unknown(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(UnknownVerdict, match=r"CUDA IPC needs cuMemAlloc_v2 of libcuda\.so\.1: libcuda\.so\.1: cannot"):
        DeviceRegion(8, DEVICE)
