"""A backup reads what the passes before it have computed: it waits for them, and without the wait the bytes are old."""

from __future__ import annotations

import pytest
from rigs.cache import Rig, rig_of

from kvcheck.core.cache.backend.backend import Signal
from kvcheck.core.cache.backend.simulated import SimulatedBackend
from kvcheck.core.cache.hicache.controller import TransferController
from kvcheck.core.stress.history import History, OperationEvents
from kvcheck.core.stress.oracles.oracle import judge
from kvcheck.core.stress.oracles.ordering import OrderingOracle
from kvcheck.core.stress.strategies import DelayStrategy


class UnorderedBackup(TransferController):
    """Backups do not wait for the forward lane; loads do."""

    def _behind_forward(self) -> tuple[Signal, ...]:
        return () if not self._queued else super()._behind_forward()


def backed_up_behind_a_slow_pass(monkeypatch: pytest.MonkeyPatch, controller: type[TransferController]) -> Rig:
    """A prefix is computed by a pass that runs when it is waited for, backed up, loaded back and read."""
    monkeypatch.setattr("rigs.cache.TransferController", controller)
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
    assert judge(OrderingOracle(), rig.history) == (), "the rig's operations name no footprint: the bytes tell"
