"""Memory of the stand-in device: what is done with it is queued on the current stream and runs when the stream does.

`cuda.py` has the streams. Code that calls torch operations on tensors of the device runs over it as it is.

Invariants:
- An operation on memory of the device runs in the order of its stream, with what its arguments hold then. On memory of
  the host it runs at once.
- A value of the device that the process reads makes it wait for the current stream, as on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fakes.cuda import Machine, Stream
from rigs.host_waits import WAITING_METHODS, WAITING_TAGS, WITH_MASKS, Storages
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvcheck.testing.streams import _is_view, _refill, _written


class Memory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Puts off what is done with the device's memory. `put` says what lies there."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._machine = machine
        self._on_device = Storages()
        self._is_running = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        """From now on the tensor lies on the device."""
        self._on_device.add(tensor)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._on_device.holds(tensor)

    @property
    def stream(self) -> Stream:
        return self._machine.current or self._machine.ordinary

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        given = [each for each in tree_leaves((args, named)) if isinstance(each, torch.Tensor)]
        if self._is_running or _is_view(func) or not any(map(self.holds, given)):
            return func(*args, **named)
        has_mask = any(each.dtype is torch.bool for each in given[1:])
        if any(tag.name in WAITING_TAGS for tag in func.tags) and (has_mask or not _is_indexing(func)):
            self.wait()
            return func(*args, **named)
        if func._schema.is_mutable:
            self._later(lambda: func(*args, **named))
            return _written(func, args, named)
        made = func(*args, **named)
        for each in tree_leaves(made):
            self.put(each)
        self._later(lambda: _refill(made, func(*args, **named)))
        return made

    def wait(self) -> None:
        """The process waits for the current stream, inside a call that nobody can replace."""
        Stream.synchronize(self.stream)

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in memory of the host, of what is there now."""
        copies: list[torch.Tensor] = []
        self._run(lambda: copies.append(tensor.clone()))
        return copies[0]

    def _later(self, work: Callable[[], object]) -> None:
        self.stream.call(lambda: self._run(work))

    def _run(self, work: Callable[[], object]) -> None:
        before, self._is_running = self._is_running, True
        try:
            work()
        finally:
            self._is_running = before


def _is_indexing(func: Any) -> bool:
    return func._schema.name.partition("::")[2] in WITH_MASKS


@contextmanager
def memory(machine: Machine) -> Iterator[Memory]:
    """In here the device has memory."""
    made = Memory(machine)

    def waiting(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
        def wait_and_read(tensor: torch.Tensor, *args: Any, **named: Any) -> Any:
            if not made.holds(tensor):
                return read(tensor, *args, **named)
            made.wait()
            return made.on_host(tensor) if name == "cpu" else read(tensor, *args, **named)

        return wait_and_read

    with pytest.MonkeyPatch.context() as patch:
        for name in WAITING_METHODS:
            patch.setattr(torch.Tensor, name, waiting(name, getattr(torch.Tensor, name)))
        with made:
            yield made
