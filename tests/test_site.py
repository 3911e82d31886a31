"""The site of the documents: its menu has every page, files that pages link come along, mkdocs builds it strictly."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_documents import DOCUMENTS

ROOT = Path(__file__).parents[1]
SITE = runpy.run_path(str(ROOT / "docs" / "site_pages.py"))
PAGES: Callable[..., list[str]] = SITE["pages"]
LINKED: Callable[..., list[str]] = SITE["linked"]
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs: pip install 'kvcheck[docs]'"
)


def menu(entries: list[Any]) -> Iterator[tuple[str, str]]:
    """(title, page) of each entry of `nav`, those below others too."""
    for entry in entries:
        ((title, value),) = entry.items()
        if isinstance(value, list):
            yield from menu(value)
        else:
            yield title, value


def test_the_menu_has_every_page_once_and_every_document_is_a_page() -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    rows = [*menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])]
    assert sorted(page for _, page in rows) == PAGES()
    assert {name for name in DOCUMENTS if not name.startswith("tests/")} <= {*PAGES()}


def test_files_that_pages_link_come_with_them(tmp_path: Path) -> None:
    files = LINKED()
    assert {"LICENSE", "docs/images/bug-a.png", "docs/examples/own-pool/test_my_pool.py"} <= {*files}
    assert all((ROOT / path).is_file() for path in files) and not {*files} & {*PAGES()}
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/a.py").write_text("")
    links = ("a.py#L1", "../README.md", "nowhere.py", "https://x.invalid/a.py", "../docs")
    (tmp_path / "docs/b.md").write_text(" ".join(f"[link]({each})" for each in links))
    (tmp_path / "README.md").write_text("")
    assert PAGES(tmp_path) == ["README.md", "docs/b.md"] and LINKED(tmp_path) == ["docs/a.py"]


@needs_mkdocs
@pytest.mark.processes(starts=True)
def test_mkdocs_builds_the_site_and_asks_nobody(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "docs/codes.html").is_file() and (tmp_path / "docs/images/bug-a.png").is_file()
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(http[^"]+)', (tmp_path / "index.html").read_text())
    assert loaded == []
