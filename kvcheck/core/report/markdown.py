"""Markdown of texts from a record: escaped text, code spans, code blocks and rows of tables.

Invariants:
- Text of a record cannot become markup, a link or a new line. In text, what markdown could read so is a character
  reference; an underscore inside a word and a colon before a space are none. Inside code nothing is escaped, and the
  fence is longer than any run of backticks in it.
- A text is cut after MOST_CHARS, and ends in … then.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcheck.core.report.printable import printable

MOST_CHARS = 1000
PLAIN = re.compile(r"[^\w .,%()/+–±;':-]|:(?=\S)|(?<!\w)_+(?!_)|(?<=[^\W_])_+(?!\w)|(?<=www)\.")
BACKTICKS = re.compile("`+")


def escaped(text: str) -> str:
    """`text` as markdown that shows just this text, on one line."""
    return PLAIN.sub(lambda found: "".join(f"&#{ord(char)};" for char in found[0]), _shown(text))


def code_span(text: str) -> str:
    """`text` as code in a line; not for a table, whose rows | would split."""
    shown = _shown(text) or " "
    fence = "`" * (_longest(shown) + 1)
    padded = f" {shown} " if shown.startswith(("`", " ")) or shown.endswith(("`", " ")) else shown
    return f"{fence}{padded}{fence}"


def code_block(lines: Sequence[str]) -> list[str]:
    """Lines of code, each cut at its end only where it has more than 20 times MOST_CHARS."""
    shown = [printable(line[: 20 * MOST_CHARS]) for line in lines]
    fence = "`" * max(3, *(_longest(line) + 1 for line in shown)) if shown else "```"
    return [fence, *shown, fence]


def table_line(texts: Sequence[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(escaped(text) for text in texts) + " |"


def _shown(text: str) -> str:
    return printable(text if len(text) <= MOST_CHARS else f"{text[:MOST_CHARS]}…")


def _longest(text: str) -> int:
    return max(map(len, BACKTICKS.findall(text)), default=0)
