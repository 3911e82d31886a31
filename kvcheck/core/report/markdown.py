"""Markdown from texts of a record: escaped text, code spans, code blocks and table rows.

Invariants:
- Text of a record cannot become markup, a link or a new line: characters with a meaning in markdown become character
  references. In code nothing is escaped; the fence is longer than any run of backticks in it.
- A longer text is cut after MOST_CHARS and ends in ….
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MOST_CHARS = 1000
PLAIN = re.compile(r"[^\w .,%()/+–±;':-]|:(?=\S)|(?<!\w)_+(?!_)|(?<=[^\W_])_+(?!\w)|(?<=www)\.")
BACKTICKS = re.compile("`+")


def printable(text: str, keep: str = "") -> str:
    r"""Escape control, format and surrogate characters and odd spaces as \x1b or \u202e, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode("ascii") for char in text
    )


def escaped(text: str) -> str:
    return PLAIN.sub(lambda found: "".join(f"&#{ord(char)};" for char in found[0]), _shown(text))


def code_span(text: str) -> str:
    """Return `text` as inline code; not for a table, since | would split its row."""
    shown = _shown(text) or " "
    fence = "`" * (_longest(shown) + 1)
    padded = f" {shown} " if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) else shown
    return f"{fence}{padded}{fence}"


def code_block(lines: Sequence[str]) -> list[str]:
    """Return a fenced block. A line is cut only after 20 times MOST_CHARS."""
    shown = [printable(line[: 20 * MOST_CHARS]) for line in lines]
    fence = "`" * max(3, *(_longest(line) + 1 for line in shown)) if shown else "```"
    return [fence, *shown, fence]


def table_line(texts: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(text) for text in texts) + " |"


def rule_line(columns: int) -> str:
    return "|" + " --- |" * columns


def _shown(text: str) -> str:
    return printable(text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…")


def _longest(text: str) -> int:
    return max(map(len, BACKTICKS.findall(text)), default=0)
