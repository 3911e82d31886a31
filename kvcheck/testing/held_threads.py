"""Held threads: work that save or load gives to other threads runs as late as the call allows.

Invariants:
- During the call, work is held until the call waits for it: for its thread or future, or for anything else, which lets
  all work go. It is let go after LIMIT_S too: a wait that is not seen is slow.
- After the call, work is held until the block ends. Threads that existed before are not held.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from typing import Any

from kvcheck.core.probes.frame.stubs import replaced

__tracebackhide__ = True

LIMIT_S = 0.5
END_S = 1.0
"""Longest wait for the end of work that was released after its call."""


class HeldThreads:
    """Block of one call. unrun: threads and futures whose work had not run when it returned. notes: why work was let go
    that the call may not have waited for."""

    def __init__(self) -> None:
        self.unrun: list[Any] = []
        self.notes: tuple[str, ...] = ()
        self._caller = threading.get_ident()
        self._lock = threading.RLock()
        self._gates: dict[object, threading.Event] = {}
        self._has_returned = self._is_open = self._is_inside = False

    def __enter__(self) -> HeldThreads:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open(None)
        for each in self.unrun:
            each.join(END_S) if isinstance(each, threading.Thread) else wait([each], END_S)

    def call(self, function: Callable[..., Any], *given: object) -> Any:
        with ExitStack() as stack:
            for holder, names in self._methods().items():
                stack.enter_context(replaced(holder, names))
            try:
                return function(*given)
            finally:
                with self._lock:
                    self._has_returned = True
                    self.unrun = [each for each, gate in self._gates.items() if not gate.is_set()]

    def _methods(self) -> dict[type, dict[str, Callable[..., Any]]]:
        start, join, wait_for = threading.Thread.start, threading.Thread.join, threading.Condition.wait
        submit = ThreadPoolExecutor.submit

        def held_start(thread: threading.Thread) -> None:
            if not (self._is_inside and threading.get_ident() == self._caller):  # an executor's: its work is held
                thread.run = self._late(thread, thread.run)  # type: ignore[method-assign]
            with self._inside():
                start(thread)

        def held_submit(pool: ThreadPoolExecutor, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
            key = object()
            with self._inside():
                future = submit(pool, self._late(key, work), *args, **named)
            with self._lock:
                self._gates[future] = self._gates.pop(key)
            return future

        def seen_join(thread: threading.Thread, timeout: float | None = None) -> None:
            self._open(thread)
            join(thread, timeout)

        def seen_wait(condition: threading.Condition, timeout: float | None = None) -> bool:
            if threading.get_ident() == self._caller and not self._is_inside:
                with self._lock:
                    mine = [each for each in self._gates if getattr(each, "_condition", None) is condition]
                    self._open(mine[0] if mine else None, "it waited for something that is no thread and no future")
            return wait_for(condition, timeout)

        return {
            threading.Thread: {"start": held_start, "join": seen_join},
            threading.Condition: {"wait": seen_wait},
            ThreadPoolExecutor: {"submit": held_submit},
        }

    def _late(self, key: object, work: Callable[..., Any]) -> Callable[..., Any]:
        gate = threading.Event()
        with self._lock:
            self._gates[key] = gate
            if self._is_open:
                gate.set()

        def run(*args: Any, **named: Any) -> Any:
            if not gate.wait(LIMIT_S):
                with self._lock:
                    if not self._has_returned:
                        self._is_open = True  # the rest of the call is not held
                        self._open(None, f"it took more than {LIMIT_S:g} s")
                gate.wait()
            return work(*args, **named)

        return run

    def _open(self, key: object, why: str = "") -> None:
        """Release the work of a thread; all work if it is unknown. why: that happens during the call."""
        with self._lock:
            held = {each: gate for each, gate in self._gates.items() if not gate.is_set()}
            if key in self._gates:
                held = {key: self._gates[key]}
            elif why and (len(held) > 1 or self._is_open):
                self.notes = self.notes or (f"work in other threads was let go early: {why}",)
            for gate in held.values():
                gate.set()

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Mark threading's own waits, such as that of `start`, which are no waits for the work."""
        if self._is_inside or threading.get_ident() != self._caller:
            yield
            return
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
