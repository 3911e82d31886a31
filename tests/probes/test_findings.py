"""The scripts of docs/findings: each is listed, and nothing of kvcheck is in them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
HELPER = "on_cpu.py"
SCRIPTS = sorted(path for path in (DOCS / "findings").glob("*.py") if path.name != HELPER)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_needs_nothing_of_ours(path: Path) -> None:
    assert not re.search(r"\b(kvcheck|tests|importlib|__import__)\b", path.read_text())


def test_every_script_is_listed_with_what_it_said() -> None:
    listed = set(
        re.findall(r"findings/(\w+\.py)", (DOCS / "releases.md").read_text() + (DOCS / "mooncake.md").read_text())
    )
    assert listed - {HELPER} == {path.name for path in SCRIPTS}
