"""Printable text: characters that control a terminal, or are invisible, become escapes.

Invariants:
- No unprintable character is left, except those in `keep`. Text without such characters is returned unchanged.
"""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """`text` with control, format and surrogate characters, and odd spaces, as \\x1b or \\u202e; `keep` stays."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )
