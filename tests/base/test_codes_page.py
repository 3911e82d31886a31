"""docs/codes.md is what its script makes of the table of codes."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_codes_is_made_from_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_codes.py"))["page"]()
    assert (DOCS / "codes.md").read_text(encoding="utf-8") == made, "run: python docs/make_codes.py"
