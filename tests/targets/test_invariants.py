"""Every invariant of the host tier names checks that exist; where only a rule stood, its test is here.

Invariants:
- Tests are looked up as functions of the files they are said to be in; a renamed one is noticed.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import typer
from rigs.cache import Rig, rig_of
from typer.testing import CliRunner

from kvcheck.commands import doctor
from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.stress.history import History, OperationEvents
from kvcheck.core.stress.invariants import INVARIANTS, Invariant
from kvcheck.core.stress.oracles import ORACLES
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle
from kvcheck.core.stress.strategies import DelayStrategy

HERE = Path(__file__).parents[1]


def functions(file: str) -> set[str]:
    """Names of the test functions of a file in this folder."""
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


def test_invariants_are_numbered_without_a_gap() -> None:
    assert [each.name for each in INVARIANTS] == [f"H{number}" for number in range(1, 14)]


@pytest.mark.parametrize("each", INVARIANTS, ids=lambda each: each.name)
def test_every_invariant_is_checked_by_something_that_exists(each: Invariant) -> None:
    assert each.oracles or each.tests
    assert set(each.oracles) <= set(ORACLES.names())
    for name in each.tests:
        file, _, function = name.partition("::")
        assert (HERE / file).is_file(), name
        assert function in functions(file), name


def test_list_says_of_each_invariant_what_checks_it() -> None:
    app = typer.Typer()
    app.command("list")(doctor.list_kind)
    app.command("explain")(doctor.explain)
    rows = json.loads(CliRunner().invoke(app, ["list", "invariants", "--json"]).output)
    assert [(row["name"], row["oracles"], row["tests"]) for row in rows] == [
        (each.name, list(each.oracles), list(each.tests)) for each in INVARIANTS
    ]
    said = CliRunner().invoke(app, ["explain", "h4"]).output
    assert "oracle ordering" in said and "tests/cache/hicache/test_layer_gate.py::" in said


# H6: a backup reads what has been computed


class UnorderedBackup(TransferController):
    """Backups do not wait for the forward lane; loads do."""

    def _behind_forward(self) -> tuple[Signal, ...]:
        return () if not self._queued else super()._behind_forward()


def backed_up_behind_a_slow_pass(monkeypatch: pytest.MonkeyPatch, controller: type[TransferController]) -> Rig:
    """A prefix is computed by a pass that runs when it is waited for, backed up, loaded back and read."""
    monkeypatch.setattr("cache_rig.TransferController", controller)
    history = History(keep=True)
    rig = rig_of(
        "llama-3-tiny", SimulatedBackend(DelayStrategy(["compute"]), OperationEvents(history.emit)), history=history
    )
    rig.serve("abc")
    assert rig.controller.backups
    rig.demote("abc")
    rig.spoil()
    assert rig.serve("abc") == 3
    rig.backend.drain()
    return rig


def test_a_backup_waits_for_the_pass_that_computes_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = backed_up_behind_a_slow_pass(monkeypatch, TransferController)
    rig.close()
    assert rig.words


def test_a_backup_that_does_not_wait_keeps_what_the_pages_held_before(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = backed_up_behind_a_slow_pass(monkeypatch, UnorderedBackup)
    assert rig.wrong
    assert OrderingOracle.name in {row for each in INVARIANTS if each.name == "H6" for row in each.oracles}
    assert judge(OrderingOracle(), rig.history) == (), "the rig's operations name no footprint: the bytes tell"
