"""Commands that run here: exit code and words printed, the record kept, and the model that stand-in servers serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rigs.known_answers import small

from kvcheck.commands.main import run
from kvcheck.core.base.record import RunRecord, read_record
from kvcheck.core.model.alphabet import Alphabet

PARAMETERS = small(nodes=1024, digits=6)
ALPHABET = Alphabet(PARAMETERS)


class Commands:
    """Runs kvcheck here, with its runs below one folder."""

    def __init__(self, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.out, self.capsys = out, capsys

    def said(self, *words: str) -> tuple[int, str]:
        code = run([*words])
        printed = self.capsys.readouterr()
        return code, printed.out + printed.err

    def kept(self, *words: str) -> tuple[int, str]:
        """The same, with the run kept below the folder."""
        return self.said(*words, "--out", str(self.out))

    @property
    def folder(self) -> Path:
        (folder,) = self.out.iterdir()
        return folder

    def record(self) -> RunRecord:
        return read_record(self.folder)

    def server_facts(self) -> dict[str, Any]:
        facts = self.record().environment["server"]
        assert isinstance(facts, dict)
        return facts
