"""Where scratch folders lie: page stores in memory unless a folder for temporary files was named."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from kvcheck.core.base import scratch
from kvcheck.core.base.scratch import ScratchFolder, sweep


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands for memory, beside the usual one for temporary files."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(scratch, "MEMORY", folder)
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "usual"))
    (tmp_path / "usual").mkdir()
    monkeypatch.setattr(scratch, "USUAL", (str(tmp_path / "usual"),))
    return folder


def parent(kind: str) -> Path:
    with ScratchFolder(kind) as folder:
        return folder.path.parent


def test_stores_lie_in_memory_with_room_and_other_folders_do_not(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (parent("store"), parent("ranks")) == (memory, tmp_path / "usual")
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1 << 60)
    assert parent("store") == tmp_path / "usual"
    monkeypatch.setattr(scratch, "ROOM_BYTES", 1)
    monkeypatch.setattr(scratch, "MEMORY", tmp_path / "missing")
    assert parent("store") == tmp_path / "usual"
    monkeypatch.setattr(scratch, "MEMORY", memory)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert parent("store") == tmp_path, "a folder that was named is used"


def test_stores_of_dead_runs_are_removed_from_memory_too(memory: Path) -> None:
    left = memory / "kvcheck-store-abcdefgh"
    left.mkdir(mode=0o700)
    with ScratchFolder("store") as held:
        assert sweep().removed == (str(left),)
        assert held.path.exists() and not left.exists()
