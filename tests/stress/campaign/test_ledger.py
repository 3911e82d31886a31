"""The file of batches: nothing that was written is lost, and damage is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.stress.campaign.batches import BatchResult
from kvcheck.core.stress.campaign.ledger import LEDGER, Ledger, read_ledger


def result(at: int) -> BatchResult:
    evidence = Evidence(schedules=2, traces=2, words_verified={"k": 3})
    return BatchResult(
        at=at, line=f"hicache:shape=llama-3-micro,seed={at},schedule=0", within=1, code="c", evidence=evidence
    )


def test_what_was_written_is_read(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / LEDGER)
    ledger.add([result(1)])
    ledger.add([result(2), result(3)])
    assert read_ledger(tmp_path / LEDGER) == ([result(1), result(2), result(3)], False)


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, left: int) -> None:
    path = tmp_path / LEDGER
    Ledger(path).add([result(1), result(2)])
    whole = path.read_text()
    second = whole.index("\n") + 1
    path.write_text(whole[: second + left] if left > 0 else whole[:-1])
    assert read_ledger(path) == ([result(1)], True)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda text: text.replace("schedules", "schedule", 1), "line 1: expected a batch"),
        (lambda text: f"{{}}\n{text}", "line 1: expected a batch"),
        (lambda text: text + text, "line 3: expected each batch once"),
        (lambda text: text[:30] + "\n" + text, "line 1: expected a batch"),
        (lambda text: "[" * 100_000 + "\n" + text, "line 1: expected a batch"),
    ],
)
def test_damage_is_told_with_its_line(tmp_path: Path, damage, says: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / LEDGER
    Ledger(path).add([result(1), result(2)])
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match=says):
        read_ledger(path)


def test_a_file_that_cannot_be_read_or_written_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_ledger(tmp_path / LEDGER)
    with pytest.raises(UsageError, match=r"cannot write .*--resume"):
        Ledger(tmp_path / "gone" / LEDGER).add([result(1)])
