"""Host memory: decides from how a tensor was made whether it would lie on the host of a machine with a GPU.

With stand-in streams all tensors lie on the CPU. A blocking copy waits for its stream only if its destination is host
memory. If this is undecided, the copy runs late and its destination is named.

Memory is the host's if save made it without `device=`; if it was made with `pin_memory=` and the KV was not; or if
exactly one of it and the KV was made with `device=`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from kvcheck.core.probes.frame.streams import Machine

__tracebackhide__ = True

MAKES = (torch.empty, torch.zeros, torch.ones, torch.full)
LIKES = (
    *(torch.empty_like, torch.zeros_like, torch.ones_like, torch.full_like),
    *(torch.Tensor.new_empty, torch.Tensor.new_zeros, torch.Tensor.new_ones, torch.Tensor.new_full),
)
WRITES = (torch.Tensor.copy_, torch.Tensor.__setitem__)
IN_SAVE, PINNED, WITH_DEVICE, WITHOUT = "in save without device=", "with pin_memory=", "with device=", "without"


@dataclass(slots=True, kw_only=True)
class Saving:
    """Copies of one call of save. own: storages of the KV. made: how the KV was made; None if in several ways.

    unsure: destinations of blocking copies whose side is undecided. behind: non-blocking copies on the main stream.
    """

    own: frozenset[int] = frozenset()
    made: str | None = None
    names: Mapping[int, str] = field(default_factory=dict)
    all_wait: bool = False
    unsure: dict[str, None] = field(default_factory=dict)
    behind: int = 0


class MemoryOrigins(TorchFunctionMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine
        self._made: dict[int, tuple[torch.Tensor, str]] = {}
        self._saving: Saving | None = None

    @contextmanager
    def saving(self, kv: Sequence[torch.Tensor], names: Mapping[int, str], *, all_wait: bool) -> Iterator[Saving]:
        """Run save in this block: blocking copies into host memory wait."""
        own, how = frozenset(map(storage_of, kv)), {self._how(each) for each in kv}
        made = how.pop() if len(how) == 1 else None
        self._saving = Saving(own=own, made=made, names=names, all_wait=all_wait)
        try:
            yield self._saving
        finally:
            self._saving = None

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if self._saving is not None and (func in WRITES or func is torch.Tensor.to):
            is_behind = bool(named.get("non_blocking")) or any(each is True for each in args[2:])
            if self._machine.current.is_main:
                self._saving.behind += is_behind
            elif not is_behind and func in WRITES and self._waits(args[0], self._saving):
                self._machine.current.synchronize()
                with self._machine.on(self._machine.main):
                    return func(*args, **named)
        made = func(*args, **named)
        if func in MAKES or func in LIKES:
            self._keep(func, args, named, made)
        return made

    def _waits(self, into: torch.Tensor, saving: Saving) -> bool:
        at, how = storage_of(into), self._how(into)
        if at in saving.own:
            return False
        if how == IN_SAVE or (how == PINNED != saving.made) or {how, saving.made} == {WITH_DEVICE, WITHOUT}:
            return True
        if how is None and at not in saving.names:
            return False  # a result of the device
        name = saving.names[at] if at in saving.names else f"the tensor {list(self._made[at][0].shape)}"
        saving.unsure[name] = None
        return saving.all_wait

    def _keep(self, func: Any, args: tuple[Any, ...], named: Mapping[str, Any], made: torch.Tensor) -> None:
        how: str | None = WITH_DEVICE if named.get("device") is not None else WITHOUT
        if "pin_memory" in named:
            how = PINNED
        elif func in MAKES and how == WITHOUT and self._saving is not None:
            how = IN_SAVE
        elif func in LIKES and how == WITHOUT:
            how = self._how(args[0]) if args else None
        if how is not None:
            self._made[storage_of(made)] = made, how

    def _how(self, tensor: torch.Tensor) -> str | None:
        _, how = self._made.get(storage_of(tensor), (None, None))
        return how


def storage_of(tensor: torch.Tensor) -> int:
    """Address of a tensor's storage; 0 for a layout without one, such as sparse."""
    return int(tensor.untyped_storage().data_ptr()) if tensor.layout == torch.strided else 0
