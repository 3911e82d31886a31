"""The list of reported bugs: each edit still fits the product, and each row is about a bug of its own.

Nothing here runs the product. Whether a run finds these bugs is measured elsewhere, and never decides what is listed.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import kvcheck
from kvcheck.core.base.codes import CODES
from kvcheck.core.stress.targets.mutants import MUTANTS

PACKAGE = Path(kvcheck.__file__).parent
LIST = json.loads(Path(__file__).with_name("reported_bugs.json").read_text(encoding="utf-8"))
ROWS = {"name": str, "link": str, "engine": str, "what": str, "expect": list, "edits": list}
LINK = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/[1-9]\d*")
PRODUCT = "core/cache/"


def edited(edits: list[dict[str, str]], package: Path) -> dict[str, str]:
    """What the files of the package become, by file. Raises ValueError for an edit that does not fit exactly once."""
    texts: dict[str, str] = {}
    for edit in edits:
        text = texts.get(edit["file"]) or (package / edit["file"]).read_text(encoding="utf-8")
        if (times := text.count(edit["old"])) != 1:
            raise ValueError(f"{edit['file']}: expected {edit['old']!r} once, found it {times} times")
        texts[edit["file"]] = text.replace(edit["old"], edit["new"])
    return texts


@pytest.mark.parametrize("row", LIST, ids=lambda row: row["name"])
def test_a_row_has_one_form_and_a_report_of_its_own(row: dict[str, Any]) -> None:
    assert {name: type(value) for name, value in row.items()} == ROWS
    assert row["edits"] and all(set(edit) == {"file", "old", "new"} for edit in row["edits"])
    assert LINK.fullmatch(row["link"]) and [each["link"] for each in LIST].count(row["link"]) == 1
    assert [each["name"] for each in LIST].count(row["name"]) == 1 and row["name"] not in MUTANTS
    assert set(row["expect"]) <= set(CODES) and len(LIST) == 30


@pytest.mark.parametrize("row", LIST, ids=lambda row: row["name"])
def test_an_edit_fits_the_product_once_and_leaves_other_code_that_compiles(
    row: dict[str, list[dict[str, str]]],
) -> None:
    for file, text in edited(row["edits"], PACKAGE).items():
        assert file.startswith(PRODUCT), file
        compile(text, file, "exec")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((PACKAGE / file).read_text(encoding="utf-8")))


def test_an_edit_that_fits_twice_or_not_at_all_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n", encoding="utf-8")
    for old, times in (("= 1", 2), ("= 2", 0)):
        with pytest.raises(ValueError, match=f"found it {times} times"):
            edited([{"file": "a.py", "old": old, "new": ""}], tmp_path)
    two = [{"file": "a.py", "old": "x = 1", "new": "x = 2"}, {"file": "a.py", "old": "y = 1", "new": "y = x"}]
    assert edited(two, tmp_path) == {"a.py": "x = 2\ny = x\n"}
