"""EndLayout as JSON: what ranks in different processes say of themselves before any byte moves.

Invariants:
- What is read back equals what was written; anything else is refused before its numbers are used.
"""

from __future__ import annotations

from kvcheck.core.base.errors import LayoutMismatch
from kvcheck.core.base.record import to_plain, value_from
from kvcheck.core.cache.transfer.layout import BufferLayout, EndLayout

_KINDS = (str, int, str, int)


def layout_to_json(layout: EndLayout) -> object:
    """Plain values."""
    return to_plain(layout)


def layout_from_json(raw: object) -> EndLayout:
    """The layout that a peer sent. Raises LayoutMismatch."""
    try:
        if not isinstance(raw, dict):
            raise ValueError(f"expected an object, got {type(raw).__name__}")
        fields = tuple(tuple(row) for row in raw["fields"])
        if any(tuple(map(type, row)) != _KINDS for row in fields):
            raise ValueError("fields: expected [name, width, dtype, offset] of each")
        return EndLayout(
            **{name: value_from(str, raw[name], name) for name in ("end", "model")},
            **{name: value_from(int, raw[name], name) for name in ("rank", "ranks", "page_size", "window")},
            **{name: value_from(int, raw[name], name) for name in ("row_bytes", "slots")},
            buffers=value_from(tuple[BufferLayout, ...], raw["buffers"], "buffers"),
            fields=fields,
        )
    except (ValueError, TypeError, KeyError) as error:
        raise LayoutMismatch(f"a peer's layout is none: {error}") from error
