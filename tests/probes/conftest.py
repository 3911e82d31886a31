"""What the tests of probes share: an environment with stand-ins for engines, and the child that imports SGLang's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.engine import environment

from kvcheck.core.probes.frame.engine_process import EngineProcess, Patience
from kvcheck.core.probes.installed import parse_target

NO_FAULT = ""


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("fake") / "env", NO_FAULT)


@pytest.fixture(scope="module")
def child(fake: Path) -> Iterator[EngineProcess]:
    started = parse_target(f"sglang:{fake}").start(Patience())
    yield started
    started.close()
