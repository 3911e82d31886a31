"""The site of the documents: its menu has every page, files that pages link come along, mkdocs builds it strictly."""

from __future__ import annotations

import importlib.util
import re
import runpy
import shutil
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
FIRST = {
    "1. What it finds, and a first red": "docs/first-red.md",
    "2. Read a finding": "docs/reading-a-report.md",
    "3. Your own pool": "docs/own-code.md",
    "An installed engine": "docs/engines.md",
    "A running server": "docs/live.md",
    "Workflow files and formats": "docs/ci.md",
    "On a GPU": "docs/gpu.md",
    "Finding codes": "docs/codes.md",
}
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


def test_the_menu_has_every_page_once() -> None:
    yaml = pytest.importorskip("yaml", reason="needs pyyaml")
    rows = [*menu(yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"])]
    assert sorted(page for _, page in rows) == PAGES()
    assert FIRST.items() <= dict(rows).items()


def test_every_document_is_a_page() -> None:
    apart = {name for name in DOCUMENTS if name.startswith("tests/")}
    assert {*DOCUMENTS} - apart <= {*PAGES()} and "README.md" in PAGES()


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


def built(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """What mkdocs made of a folder."""
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml"), "-d", str(out)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


@needs_mkdocs
@pytest.mark.processes(starts=True)
def test_mkdocs_builds_the_site_and_asks_nobody(tmp_path: Path) -> None:
    done = built(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "docs/codes.html").is_file() and (tmp_path / "docs/images/bug-a.png").is_file()
    loaded = re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="(http[^"]+)', (tmp_path / "index.html").read_text())
    assert loaded == []


@needs_mkdocs
@pytest.mark.processes(starts=True)
@pytest.mark.parametrize("text", ["[a](nowhere.md)", "[a](../LICENSE#x) [b](../docs)", "[a](codes.md#no-such-code)"])
def test_a_link_that_leads_nowhere_fails_the_build(text: str, tmp_path: Path) -> None:
    for path in ("mkdocs.yml", *PAGES(), *LINKED(), "docs/site_pages.py"):
        (tmp_path / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / "tree" / path)
    page = tmp_path / "tree/docs/gpu.md"
    page.write_text(f"{page.read_text(encoding='utf-8')}\n{text}\n")
    done = built(tmp_path / "tree", tmp_path / "site")
    assert done.returncode != 0 and "WARNING" in done.stderr and "gpu.md" in done.stderr
