"""Printable text: terminal control characters and invisible characters become escapes."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    r"""Escape control, format and surrogate characters and odd spaces as \x1b or \u202e, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )
