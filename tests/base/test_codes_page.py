"""docs/codes.md is what its script makes of the table of codes.

Invariants:
- The page is compared as a whole, so a code cannot be added, reworded or taken away without it.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from kvcheck.core.base.codes import CODES

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_codes_is_made_from_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_codes.py"))["page"]()
    assert (DOCS / "codes.md").read_text(encoding="utf-8") == made, "run: python docs/make_codes.py"
    assert re.findall(r"^### (KV\d+) (.*)$", made, re.MULTILINE) == [(each.code, each.title) for each in CODES.values()]
    plain = made.replace("\\_", "_")
    for each in CODES.values():
        assert all(text in plain for text in (each.meaning, each.usual_cause, each.seen_in))
