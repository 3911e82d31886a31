"""Pinned memory: host memory that an engine pins while its pools are made, and its release.

Releases pin the memory of a host pool until the process ends. A probe makes many host pools in one process, the system
reuses their addresses, and memory that is pinned already cannot be pinned.
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
    """Addresses pinned in `watched` and not unpinned since."""

    starts: list[int] = field(default_factory=list)

    @contextmanager
    def watched(self) -> Iterator[None]:
        before: Callable[[], Any] = torch.cuda.cudart
        torch.cuda.cudart = lambda: _Runtime(before(), self.starts)
        try:
            yield
        finally:
            torch.cuda.cudart = before

    def give_back(self) -> None:
        """Raises CannotDrive if the runtime refuses. No work may be queued on the device."""
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        refused = [code for start in self.starts if (code := int(runtime.cudaHostUnregister(start)))]
        self.starts.clear()
        if refused:
            raise CannotDrive(
                f"host memory of an earlier pool cannot be unpinned: cudaHostUnregister says {refused[0]}"
            )


class _Runtime:
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
