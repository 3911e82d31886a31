"""The pages of the site: a hook of mkdocs that takes README and other documents beside docs/, and the files they link.

Invariants:
- Every page and file has the path that it has in the repository, so relative links hold in both places.
- A link to what is no file fails `make site`: mkdocs is strict, and takes no folder for a page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "reports/**/*.md", "kvcheck/**/*.md", "tools/**/*.md")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages(root: Path = ROOT) -> list[str]:
    """Paths of all pages below the project's folder."""
    return sorted({path.relative_to(root).as_posix() for top in PAGES for path in root.glob(top)})


def linked(root: Path = ROOT) -> list[str]:
    """Paths of all other files that a page links or shows."""
    found = set()
    for page in pages(root):
        for target in LINK.findall((root / page).read_text(encoding="utf-8")):
            path = (root / page).parent / target
            if not re.match(r"[a-z]+:", target) and path.is_file():
                found.add(path.resolve().relative_to(root.resolve()).as_posix())
    return sorted(found - {*pages(root)})


def on_files(files: Any, config: Any) -> Any:
    """Put pages and files with their paths in the repository in the place of those below docs/."""
    from mkdocs.structure.files import File

    for file in [each for each in files if each.src_dir == config.docs_dir]:
        files.remove(file)
    for path in (*pages(), *linked()):
        files.append(File(path, str(ROOT), config.site_dir, use_directory_urls=False))
    return files
