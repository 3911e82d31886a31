"""The ledger: nothing that was written is lost, and damage is an error with its line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Evidence
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.seeds.batches import LEDGER, BatchResult, SeedsPlan, append, read_ledger

PLAN = SeedsPlan(cells=(Plan(scenario="hicache", shape="llama-3-micro"),), seeds=range(1, 4), schedules=24)


def result(seed: int) -> BatchResult:
    evidence = Evidence(schedules=2, traces=2, words_verified={"k": 3})
    return BatchResult(line=f"hicache:shape=llama-3-micro,seed={seed},schedule=0", code="c", evidence=evidence)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    append(tmp_path / LEDGER, [result(1)])
    append(tmp_path / LEDGER, [result(2), result(3)])
    assert read_ledger(tmp_path / LEDGER, PLAN) == ([result(1), result(2), result(3)], False)


@pytest.mark.parametrize("left", [1, 40, -1])
def test_a_torn_last_line_is_left_out(tmp_path: Path, left: int) -> None:
    path = tmp_path / LEDGER
    append(path, [result(1), result(2)])
    whole = path.read_text()
    second = whole.index("\n") + 1
    path.write_text(whole[: second + left] if left > 0 else whole[:-1])
    assert read_ledger(path, PLAN) == ([result(1)], True)


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "another key": (lambda text: text.replace("schedules", "schedule", 1), "line 1: expected a batch"),
    "another row": (lambda text: f"{{}}\n{text}", "line 1: expected a batch"),
    "twice": (lambda text: text + text, "line 3: .*is there twice"),
    "another plan's": (lambda text: text.replace("seed=2", "seed=4"), "line 2: .*is not of the plan"),
    "no plan's": (lambda text: text.replace("hicache:", ":"), "schedule line: expected"),
    "cut inside": (lambda text: text[:30] + "\n" + text, "line 1: expected a batch"),
    "deep": (lambda text: "[" * 100_000 + "\n" + text, "line 1: expected a batch"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error_with_its_line(tmp_path: Path, name: str) -> None:
    damage, says = DAMAGE[name]
    path = tmp_path / LEDGER
    append(path, [result(1), result(2)])
    path.write_text(damage(path.read_text()))
    with pytest.raises(UsageError, match=says):
        read_ledger(path, PLAN)


def test_a_file_that_cannot_be_read_or_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read_ledger(tmp_path / LEDGER, PLAN)
    with pytest.raises(UsageError, match=r"cannot write .*--resume"):
        append(tmp_path / "gone" / LEDGER, [result(1)])
