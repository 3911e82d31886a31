"""A backend around another one passes on every call that Backend has, with what was given and what came back."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from kvcheck.core.cache.backend.backend import Backend, Memory
from kvcheck.core.cache.backend.scoped import PassingBackend

CALLS = {
    name: call
    for kind in (Memory, Backend)
    for name, call in vars(kind).items()
    if inspect.isfunction(call) and not name.startswith("_")
}


class Noting:
    """Stands in for a backend, notes which calls are made with what, and gives back the number of the call."""

    name, device = "noting", "a device"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        def noted(*given: object, **named: object) -> int:
            self.calls.append((name, given, named))
            return len(self.calls)

        return noted


@pytest.mark.parametrize("name", [name for name in CALLS if name != "submit"])
def test_every_call_but_submit_is_passed_on(name: str) -> None:
    noting = Noting()
    backend = PassingBackend(noting)  # type: ignore[arg-type]
    assert (backend.name, backend.device, hasattr(backend, "submit")) == ("noting", "a device", False)
    _, *rows = inspect.signature(CALLS[name]).parameters.values()
    given = [row.name for row in rows if row.kind is not row.KEYWORD_ONLY]
    named: dict[str, Any] = {row.name: row.name for row in rows if row.kind is row.KEYWORD_ONLY}
    is_answered = inspect.signature(CALLS[name]).return_annotation != "None"
    assert getattr(backend, name)(*given, **named) == (1 if is_answered else None)
    assert noting.calls == [(name, tuple(given), named)]
