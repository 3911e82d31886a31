"""Whether Mooncake's transfer engine can be loaded here: the question is put to a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.cache.transfer.mooncake import library
from kvcheck.core.cache.transfer.mooncake.library import why_unusable

LIBRARIES = {
    "it loads": ("class TransferEngine: pass", None),
    "a library of the system is missing": (
        "raise ImportError('libibverbs.so.1')",
        "libibverbs.so.1; next: pip install",
    ),
    "it takes its process along": ("import os; os.abort()", "ended with -6"),
}


@pytest.mark.processes
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_cannot_be_loaded_is_told_with_the_reason(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected = LIBRARIES[name]
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "engine.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(library, "require_library", lambda: library.OLDEST)
    told = why_unusable()
    assert (told is None) if expected is None else (told is not None and expected in told)


def test_without_the_library_no_process_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_version_of", lambda build: None)
    assert "transport mooncake needs the mooncake transfer engine; next: pip install" in str(why_unusable())
