"""Server arguments: publishes the arguments that SGLang reads when its pools, trees and requests are made.

Invariants:
- They are published by name, in the same way as SGLang's own tests do it. No version is read.
- Arguments that were published for one probe are gone for the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kvcheck.core.probes.frame.calls import fitted
from kvcheck.core.probes.frame.names import Names

STATE_CHUNK: Final = 4
"""Tokens between two states of a recurrent model. Without it, some releases read a model's configuration for it."""


def prepare(names: Names) -> None:
    """Publish the arguments of a server of one rank."""
    _publish(names, {})


@contextmanager
def published(names: Names, **values: object) -> Iterator[Any]:
    """In here the server's arguments have these values. Yields the arguments, or None where a release has none."""
    try:
        yield _publish(names, values)
    finally:
        prepare(names)


def _publish(names: Names, values: dict[str, object]) -> Any:
    if not (names.has("server.args") and names.has("server.publish")):
        return None
    arguments = fitted(names["server.args"], {"model_path": "dummy", **values})
    arguments._mamba_cache_chunk_size = STATE_CHUNK
    names["server.publish"](arguments)
    return arguments
