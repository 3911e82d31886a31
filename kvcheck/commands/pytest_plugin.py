"""pytest's plugin: `pytest --kvcheck`, its fixtures and its marker.

Invariants:
- Without --kvcheck only this module and `pytest_asks` are imported, and tests that use kvcheck are skipped.
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvcheck.commands.pytest_asks import JUDGED, MARKER, asks

if TYPE_CHECKING:
    from kvcheck.commands.pytest_run import PoolChecks
    from kvcheck.testing import Streams

RUN = "kvcheck-run"
MOST_SEED = 2**62
"""Greatest seed of a record, with room for the seeds that follow."""
OFF = "needs pytest --kvcheck"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvcheck", "KV cache integrity")
    group.addoption("--kvcheck", action="store_true", help="run the tests that ask for kvcheck, and show its findings")
    group.addoption(
        "--kvcheck-seed", type=_seed, default=0, metavar="N", help="the first seed of each test (default 0)"
    )
    group.addoption(
        "--kvcheck-out",
        type=Path,
        metavar="DIR",
        help="keep a record of the run there, for kvcheck report and kvcheck gate",
    )


def _seed(text: str) -> int:
    try:
        seed = int(text)
    except ValueError:
        raise ArgumentTypeError(f"expected a whole number, got {text!r}") from None
    if abs(seed) > MOST_SEED:
        raise ArgumentTypeError(f"expected a number from -{MOST_SEED} to {MOST_SEED}, got {seed}")
    return seed


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"{MARKER}(count): run the test with so many seeds, under pytest --kvcheck")
    if config.getoption("kvcheck"):
        from kvcheck.commands.pytest_run import CheckedRun

        config.pluginmanager.register(CheckedRun(config), RUN)
    elif config.getoption("kvcheck_out") is not None:
        raise pytest.UsageError("--kvcheck-out keeps a record of what --kvcheck judges: add --kvcheck")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if asks(item) and not item.config.getoption("kvcheck"):
        pytest.skip(OFF)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    told = (
        (report, report.longrepr[2].removeprefix("Skipped: ")) for report in terminalreporter.stats.get("skipped", ())
    )
    skipped = Counter(reason for report, reason in told if reason == OFF or hasattr(report, JUDGED))
    for reason, count in skipped.items():
        terminalreporter.write_line(f"kvcheck: {count} test{'s' * (count > 1)} skipped: {reason}")


@pytest.fixture
def kvcheck_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run of the test: what kvcheck.testing draws from, and what the test may draw from."""
    seed: int = getattr(request, "param", request.config.getoption("kvcheck_seed"))
    return seed


@pytest.fixture
def kvcheck_pool(request: pytest.FixtureRequest) -> PoolChecks:
    """check_round_trip and watch of kvcheck.testing. A test that asks for it has to judge something."""
    from kvcheck.commands.pytest_run import PoolChecks

    return PoolChecks()


@pytest.fixture
def kvcheck_streams(request: pytest.FixtureRequest) -> Iterator[Streams]:
    """The streams of kvcheck.testing, for the whole test. A test that asks for it has to judge something."""
    from kvcheck.testing import streams

    with streams() as held:
        yield held
