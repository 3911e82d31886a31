"""Copy engine: copies between host and device pools, in place of the compiled ones, on the stand-in streams.

Invariants:
- Index lists are read at the call. Bytes are read and written when the copy runs: at a wait for its stream, or at a
  moment drawn from the seed.
- A copy that the compiled one refuses, or that leaves the memory of both tiers, goes to `complain` and is not made. A
  call with unknown parameters ends the probe.
"""

from __future__ import annotations

import ctypes
import inspect
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType

from kvcheck.core.probes.frame.guard import Call, CannotDrive, under_way
from kvcheck.core.probes.frame.streams import Machine
from kvcheck.core.probes.frame.stubs import replaced
from kvcheck.core.probes.sglang.rig.byte_copies import ByteCopy, CopyRefused, Pieces
from kvcheck.core.probes.sglang.rig.kernels_aot import AOT_KERNELS
from kvcheck.core.probes.sglang.rig.kernels_jit import JIT_KERNELS


@dataclass(slots=True)
class CopyEngine:
    """complain: called with a wrong request. regions: sorted (address, bytes) of both tiers' memory.

    package: of the engine. calls: every copy with the engine's functions that asked for it.
    """

    machine: Machine
    complain: Callable[[str], None]
    regions: Sequence[tuple[int, int]] = ()
    package: str = ""
    asked: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[Sequence[ByteCopy], Call]] = field(default_factory=list)
    moved_bytes: int = 0

    @property
    def has_copied(self) -> bool:
        return bool(self.moved_bytes)

    @contextmanager
    def lent_to(self, modules: Iterable[ModuleType]) -> Iterator[None]:
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(replaced(module, self.table()))
            yield

    def table(self) -> dict[str, Callable[..., None]]:
        return {name: partial(self._asked, name, call) for name, call in (AOT_KERNELS | JIT_KERNELS).items()}

    def _asked(self, name: str, call: Callable[..., Pieces], *arguments: object, **named: object) -> None:
        try:
            inspect.signature(call).bind(*arguments, **named)
        except TypeError as error:
            raise CannotDrive(f"{name} is asked for in a way that nobody here knows: {error}") from error
        self.asked[name] = self.asked.get(name, 0) + 1
        try:
            pieces = call(*arguments, **named)
        except CopyRefused as error:
            self.complain(f"{name} refuses {error}")
            return
        asker = under_way(self.package)
        for moves in pieces:
            inside = [move for move in moves if self._is_inside(name, move)]
            self.calls.append((inside, asker))
            self.machine.queue(partial(self._run, inside))

    def asker(self, start: int, size: int) -> Call:
        """Return the engine's functions at the last copy to any of these bytes; none without a copy."""
        for moves, call in reversed(self.calls):
            if any(move.target < start + size and start < move.target + move.size for move in moves):
                return call
        return ()

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
