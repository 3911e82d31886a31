"""What cannot be imported in an engine's environment, and what only stands in for something."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.probes.frame.guard import CannotDrive
from kvcheck.core.probes.frame.names import Names


def test_what_cannot_be_imported_is_not_called_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "release"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "lacking.py").write_text("import what_nobody_has\n")
    (package / "broken.py").write_text("raise ValueError('Invalid version: N/A')\n")
    (package / "confused.py").write_text("import os\nos.nope\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = Names(
        {
            "lacking": ("release.gone:x", "release.lacking:x"),
            "broken": ("release.broken:x", "release.gone:x"),
            "confused": ("release.confused:x",),
            "renamed": ("release:x", "release.gone.deeper:x", "json.decoder.deeper:x"),
        }
    )
    with pytest.raises(CannotDrive) as caught:
        names.require(("renamed", "broken", "lacking", "confused"))
    for told in (
        "broken cannot be imported: release.broken:x: ValueError: Invalid version: N/A",
        "lacking cannot be imported: release.lacking:x: ModuleNotFoundError",
        "confused cannot be imported: release.confused:x: AttributeError",
        "this release has no renamed (tried release:x: release has no x",
    ):
        assert told in str(caught.value)
    with pytest.raises(CannotDrive, match="broken cannot be imported"):
        names["broken"]
