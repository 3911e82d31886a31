"""Host waits: which calls of an operation would make the process wait for a device, seen on a CPU.

On a device, a value that the process reads inside an operation makes it wait for all that the lane is behind. On a CPU
nothing waits, so the calls themselves are looked at.

Invariants:
- Memory of the device is what a backend gave as such, its index tensors, what a chunk makes of these, and what it makes
  of nothing with a `device`. Other tensors are memory of the host.
- Functions of `kvcheck/kernels/` have a form for the host, which is not what a device runs. So their calls are passed
  over, and what they make is memory of the device unless it is made of host memory alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvcheck
from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.backend.backend import Backend, ChunkWork, Footprint, Lane, Operation, Place, Signal
from kvcheck.core.cache.backend.scoped import PassingBackend

PACKAGE = Path(kvcheck.__file__).parent
KERNELS = str(PACKAGE / "kernels")
WAITING_TAGS = ("data_dependent_output", "dynamic_output_shape")
"""torch's own marks of calls whose result the process has to know."""
WAITING_METHODS = ("cpu", "numpy", "tolist", "__array__")
"""Methods that are no torch call where the tensor is on a CPU."""
WITH_MASKS = ("index", "index_put_", "_index_put_impl_")
"""Calls that make the process wait only if an index is a mask."""


@dataclass(frozen=True, slots=True)
class HostWait:
    """A call of an operation that waits for the device."""

    operation: str
    call: str
    place: str

    def __str__(self) -> str:
        return f"{self.operation}: {self.call} at {self.place}"


class Storages:
    """Memory, by its address, for as long as it lives."""

    def __init__(self) -> None:
        self._known: dict[int, StorageWeakRef] = {}

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._known[storage.data_ptr()] = StorageWeakRef(storage)

    def holds(self, tensor: torch.Tensor) -> bool:
        known = self._known.get(tensor.untyped_storage().data_ptr())
        return known is not None and not known.expired()


class AroundChunks(PassingBackend):
    """A backend that calls the chunks of operations in its own way, but for those that say that they wait."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.judged: dict[str, int] = {}
        """Chunks, by the name of their operation."""

    def submit(
        self,
        operation: Operation,
        *,
        lane: Lane,
        reads: Sequence[Footprint] = (),
        writes: Sequence[Footprint] = (),
        after: Sequence[Signal] = (),
    ) -> Signal:
        around = operation
        if not operation.joins_host and not any(each.place is Place.PAGEABLE for each in writes):
            stage = operation.stage
            around = replace(
                operation,
                chunks=self._around(operation.name, operation.chunks),
                stage=None if stage is None else lambda: self._around(operation.name, stage()),
            )
        return self.inner.submit(around, lane=lane, reads=reads, writes=writes, after=after)

    def call(self, name: str, chunk: ChunkWork) -> None:
        raise NotImplementedError

    def _around(self, name: str, chunks: Sequence[ChunkWork]) -> tuple[ChunkWork, ...]:
        def around(chunk: ChunkWork) -> None:
            self.judged[name] = self.judged.get(name, 0) + 1
            self.call(name, chunk)

        return tuple(partial(around, chunk) for chunk in chunks)


class HostWaits(AroundChunks):
    """A CPU backend that notes what would wait. Operations, and their order, are those of a run without it."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.found: dict[HostWait, None] = {}
        self.on_device, self.pinned = Storages(), Storages()

    def empty(self, name: str, shape: Sequence[int], dtype: torch.dtype, place: Place) -> torch.Tensor:
        tensor = super().empty(name, shape, dtype, place)
        if place is not Place.PAGEABLE:
            (self.on_device if place is Place.DEVICE else self.pinned).add(tensor)
        return tensor

    def index(self, values: IndexArray) -> torch.Tensor:
        ids = super().index(values)
        self.on_device.add(ids)
        return ids

    def call(self, name: str, chunk: ChunkWork) -> None:
        with _Calls(self, name), _Methods(self, name):
            chunk()

    def note(self, operation: str, call: str) -> None:
        place = _place()
        if place is not None:
            self.found[HostWait(operation, call, place)] = None


class StrictBackend(AroundChunks):
    """A CUDA backend in whose operations torch refuses every call that synchronises."""

    def index(self, values: IndexArray) -> torch.Tensor:
        """Ids are uploaded on a stream that no lane has, so this waits for no lane, also inside an operation."""
        with _sync_debug("default"):
            return super().index(values)

    def call(self, name: str, chunk: ChunkWork) -> None:
        with _sync_debug("error"):
            chunk()


@contextmanager
def _sync_debug(mode: str) -> Iterator[None]:
    last = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(last)


def _place() -> str | None:
    """Where this package or a test makes the call; None for a kernel."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ or "/torch/" in frame.f_code.co_filename:
        assert frame.f_back is not None
        frame = frame.f_back
    file = frame.f_code.co_filename
    if file.startswith(KERNELS):
        return None
    return f"{Path(file).name}:{frame.f_lineno}"


def _tensors(*values: object) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class _Methods(TorchFunctionMode):
    """Sees the methods that on a CPU only look at memory, and what is made of nothing."""

    def __init__(self, waits: HostWaits, operation: str) -> None:
        super().__init__()
        self._waits = waits
        self._operation = operation

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", ""), kwargs or {}
        given = _tensors(args, named)
        is_to_host = name in WAITING_METHODS or (name == "to" and "cpu" in map(str, (*args[1:], *named.values())))
        if is_to_host and self._waits.on_device.holds(given[0]):
            self._waits.note(self._operation, name)
        result = func(*args, **named)
        if isinstance(result, torch.Tensor) and not given and (named.get("device") is not None or _place() is None):
            self._waits.on_device.add(result)
        return result


class _Calls(TorchDispatchMode):
    """Sees the calls themselves. What they make is memory of the device."""

    def __init__(self, waits: HostWaits, operation: str) -> None:
        super().__init__()
        self._waits = waits
        self._operation = operation

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: nothing here is compiled, and torch would import its compiler, which takes seconds."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name, named = func.overloadpacket.__name__, kwargs or {}
        given = _tensors(args, named)
        is_on_device = any(map(self._waits.on_device.holds, given))
        if is_on_device and self._waits_for(func, name, args):
            self._waits.note(self._operation, name)
        result = func(*args, **named)
        if is_on_device and not any(each.alias_info for each in func._schema.returns):
            for made in _tensors(result):
                self._waits.on_device.add(made)
        return result

    def _waits_for(self, func: Any, name: str, args: tuple[Any, ...]) -> bool:
        if name in WITH_MASKS:
            return any(each.dtype in (torch.bool, torch.uint8) for each in _tensors(args[1]))
        if name == "copy_":
            target, source = args[:2]
            is_host = not self._waits.on_device.holds(target) and not self._waits.pinned.holds(target)
            return is_host and self._waits.on_device.holds(source)
        return any(tag.name in WAITING_TAGS for tag in func.tags)
