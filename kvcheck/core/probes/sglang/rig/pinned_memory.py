"""Pinned memory: what an engine pins of the host while its pools are made, and how it is given back.

Releases pin the memory of a host pool and let it go with the process. A probe makes many host pools in one process. The
system gives their addresses out again, and what is pinned already cannot be pinned.

Invariants:
- The engine's calls go to the real runtime. They are only remembered.
- Memory is given back when nothing is queued on the device any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive


@dataclass(slots=True)
class PinnedMemory:
    """First bytes of what was pinned in `watched` and not given back since."""

    starts: list[int] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """In here what the engine pins is remembered."""
        before: Callable[[], Any] = torch.cuda.cudart
        torch.cuda.cudart = lambda: _Runtime(before(), self.starts)
        try:
            yield
        finally:
            torch.cuda.cudart = before

    def give_back(self) -> None:
        """Unpin all. Raises CannotDrive if the runtime does not."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = [code for start in self.starts if (code := int(runtime.cudaHostUnregister(start)))]
        self.starts.clear()
        if refused:
            raise CannotDrive(
                f"host memory of an earlier pool cannot be unpinned: cudaHostUnregister says {refused[0]}"
            )


class _Runtime:
    """The CUDA runtime as torch has it, which remembers what is pinned."""

    def __init__(self, runtime: Any, starts: list[int]) -> None:
        self._runtime = runtime
        self._starts = starts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def cudaHostRegister(self, start: int, *rest: Any) -> Any:
        code = self._runtime.cudaHostRegister(start, *rest)
        if int(code) == 0:
            self._starts.append(start)
        return code

    def cudaHostUnregister(self, start: int) -> Any:
        code = self._runtime.cudaHostUnregister(start)
        if int(code) == 0 and start in self._starts:
            self._starts.remove(start)
        return code
