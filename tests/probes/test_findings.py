"""The scripts of docs/findings: short enough to be read whole, and nothing of kvcheck in them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
HELPER = "on_cpu.py"
SCRIPTS = sorted(path for path in (DOCS / "findings").glob("*.py") if path.name != HELPER)
LINES, WIDTH = 40, 120


def imported(source: str) -> set[str]:
    """Packages that a file imports, wherever it does."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {each.name.partition(".")[0] for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_short_and_needs_nothing_of_ours(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= WIDTH
    assert imported(path.read_text()) & {"kvcheck", "tests"} == set()
    assert "importlib" not in path.read_text() and "__import__" not in path.read_text()


def test_every_script_is_listed_with_what_it_said() -> None:
    listed = set(
        re.findall(r"findings/(\w+\.py)", (DOCS / "releases.md").read_text() + (DOCS / "mooncake.md").read_text())
    )
    assert listed - {HELPER} == {path.name for path in SCRIPTS}
