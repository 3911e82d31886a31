"""Server arguments: publishes the arguments that SGLang reads when its pools, trees and requests are made.

They are published by name, as in SGLang's own tests, without reading a version.
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
    _publish(names, {})


@contextmanager
def published(names: Names, **values: object) -> Iterator[Any]:
    """Yields the arguments, or None in a release without them."""
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
