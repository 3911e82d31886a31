"""Writes docs/codes.md, the page of all finding codes, from the table that `kvcheck explain` prints.

Invariants:
- The page has every code once, in the order of the table, below the group of its first digit.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from kvcheck.core.base.codes import CODES, Code

PAGE = Path(__file__).parent / "codes.md"
GROUPS = {
    "KV1": "Wrong bytes",
    "KV2": "Wrong order",
    "KV3": "Wrong shape, place or value",
    "KV4": "Owners of memory",
    "KV5": "Wrong output",
    "KV6": "Ranks, rooms and schedulers",
    "KV7": "The prefix cache",
    "KV8": "Running servers",
    "KV9": "The run itself",
}
HEAD = """# Finding codes

A code keeps its meaning once it is published, so that scripts and [baselines](gate.md#known-findings) can depend on
it. `kvcheck explain CODE` prints one of them, and `kvcheck list codes` all. This page is made from the same table:
`python docs/make_codes.py`.
"""


def page() -> str:
    """The text of docs/codes.md."""
    parts = [HEAD]
    for group, codes in groupby(CODES.values(), key=lambda each: each.code[:3]):
        parts.append(f"\n## {GROUPS[group]}\n\n" + "".join(_entry(code) for code in codes).rstrip("\n") + "\n")
    return "".join(parts)


def _entry(code: Code) -> str:
    """One code: its meaning, its usual cause, and where it was seen."""
    cause, seen = _inline(code.usual_cause), _inline(code.seen_in)
    return f"### {code.code} {code.title}\n\n{code.meaning} **Usual cause:** {cause} **Seen in:** {seen}\n\n"


def _inline(text: str) -> str:
    """The text, with characters that markdown takes as its own kept as they are."""
    return text.replace("_", "\\_").replace("*", "\\*").replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
