"""Fixtures of several commands: runs in a new folder, a model of known answers, both engines, and no waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.server_runs import PARAMETERS, Commands

from kvcheck.core.live import doubts, health, runner
from kvcheck.core.live.clients import asking
from kvcheck.core.live.own import runner as own_runner
from kvcheck.core.live.prices import side
from kvcheck.core.model.folder import write_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("known-answers") / "model"
    write_model(PARAMETERS, folder)
    return folder


@pytest.fixture(params=("sglang", "vllm"))
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def kvcheck(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Commands:
    """Commands whose runs lie in a new folder."""
    return Commands(tmp_path / "runs", capsys)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (runner, own_runner, side):
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
    for module in (health, doubts):
        monkeypatch.setattr(module, "PAUSE_S", 0.01)
    monkeypatch.setattr(asking, "GRACE_S", 0.02)
