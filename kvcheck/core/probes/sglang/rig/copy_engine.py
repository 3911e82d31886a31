"""Copies: the compiled copies between host and device pools, restated, and queued on the current stand-in stream.

They are no stubs: what they are asked for is what reaches the other tier, late, when somebody waits for the stream or
the seed lets it go on.

Invariants:
- Lists are read when a copy is asked for, bytes are read and written when it runs.
- What the compiled ones refuse, and what would touch a byte outside the memory of both tiers, is told to `complain` and
  not made. What nobody here can do ends the probe.
"""

from __future__ import annotations

import ctypes
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.streams import Machine
from kvcheck.core.probes.sglang.rig.byte_copies import ByteCopy, Pieces, Refused
from kvcheck.core.probes.sglang.rig.kernels_aot import AOT_KERNELS
from kvcheck.core.probes.sglang.rig.kernels_jit import JIT_KERNELS

ABSENT = object()


@dataclass(slots=True)
class CopyEngine:
    """All of them. complain: told of a wrong request. regions: (first byte, bytes) of what may be touched, in order."""

    machine: Machine
    complain: Callable[[str], None]
    regions: Sequence[tuple[int, int]] = ()
    asked: dict[str, int] = field(default_factory=dict)
    moved_bytes: int = 0

    @contextmanager
    def lent_to(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        """The modules of an engine find these by the names that they know; afterwards everything is as it was."""
        with lent(modules, self.table()):
            yield

    def table(self) -> dict[str, Callable[..., None]]:
        """Every function by its name."""
        return {name: partial(self._asked, name, call) for name, call in (AOT_KERNELS | JIT_KERNELS).items()}

    def _asked(self, name: str, call: Callable[..., Pieces], *arguments: object, **named: object) -> None:
        """The engine asks for a copy."""
        try:
            inspect.signature(call).bind(*arguments, **named)
        except TypeError as error:
            raise CannotDrive(f"{name} is asked for in a way that nobody here knows: {error}") from error
        self.asked[name] = self.asked.get(name, 0) + 1
        try:
            pieces = call(*arguments, **named)
        except Refused as error:
            self.complain(f"{name} refuses {error}")
            return
        for moves in pieces:
            inside = [move for move in moves if self._is_inside(name, move)]
            self.machine.queue(partial(self._run, inside))

    def _run(self, moves: Sequence[ByteCopy]) -> None:
        for move in moves:
            ctypes.memmove(move.target, move.source, move.size)
            self.moved_bytes += move.size

    def _is_inside(self, name: str, move: ByteCopy) -> bool:
        for what, start in (("reads", move.source), ("writes", move.target)):
            at = bisect_right(self.regions, (start, 1 << 63)) - 1
            if at < 0 or start + move.size > sum(self.regions[at]):
                self.complain(f"{name} {what} {move.size} bytes outside the memory of both tiers")
                return False
        return True


@contextmanager
def lent(modules: Iterable[ModuleType], table: Mapping[str, object]) -> Iterator[None]:
    """Names of modules that mean something else meanwhile."""
    kept = [(vars(module), {name: vars(module).get(name, ABSENT) for name in table}) for module in modules]
    for names, _ in kept:
        names.update(table)
    try:
        yield
    finally:
        for names, before in kept:
            names.update(before)
            for name in [name for name, value in before.items() if value is ABSENT]:
                del names[name]
