"""What every test gets: poisoned fresh memory, an environment without kvcheck's settings, and honest skips."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

# One thread a worker: the workers already fill the cores, and sums do not depend on a split. Set before torch loads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A queue of the device for each stream, as the commands have it: a held lane stands in nobody's way.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# A shell ignores Ctrl-C for what it runs in the background, and so would the commands that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch
from rigs.forked import ForkingPopen
from rigs.guards import COMPILED, HELD, PROCESSES, SCHEDULES, Unmarked, mark_one_a_bug

# Images for containers often set it. Commands that are started would then compile all of kvcheck each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# torch and all tests are always alive, and at the usual thresholds the collector looks through them again and again.
gc.set_threshold(20_000, 20, 20)

if importlib.util.find_spec("hypothesis") is not None:  # `make gpu` runs what it can on a machine without
    import hypothesis

    hypothesis.settings.register_profile("kvcheck", derandomize=True, deadline=None, max_examples=50)
    hypothesis.settings.register_profile("quick", hypothesis.settings.get_profile("kvcheck"), max_examples=10)
    hypothesis.settings.load_profile("kvcheck")

UNMARKED = pytest.StashKey[Unmarked]()
ALLOCATORS = ("empty", "empty_like", "empty_strided")
POISON_BYTE = 0xA5
PLAIN_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill what was just allocated with values that no test expects."""
    if tensor.device.type == "meta" or tensor.numel() == 0:
        return tensor
    if tensor.dtype in PLAIN_FLOATS:
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:  # any byte but 0 and 1 is undefined behaviour
        return tensor.fill_(True)
    if tensor.ndim and tensor.is_contiguous():
        tensor.view(torch.uint8).fill_(POISON_BYTE)
    return tensor


def poisoning(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`allocate`, with its result poisoned."""

    def allocate_poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(allocate(*args, **kwargs))

    return allocate_poisoned


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--no-poison", action="store_true", help="leave fresh memory alone: for a tool that sees who reads it unwritten"
    )


POISONED = {name: poisoning(getattr(torch, name)) for name in ALLOCATORS}


@pytest.fixture(autouse=True)
def surroundings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poisoned memory, a plain environment, and a failure for what a test or its fixtures do without the marker for it.

    One fixture, since each takes time of every test. Code that relies on fresh memory being zero fails here instead of
    on a busy machine. Settings of whoever runs the tests, and colour forced by a CI service, do not reach the commands.
    """
    if not request.config.getoption("--no-poison"):
        for name, allocate in POISONED.items():
            monkeypatch.setattr(torch, name, allocate)
    for name in [*os.environ]:
        if name.startswith("KVCHECK_") or name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("COLUMNS", raising=False)
    before = frozenset(os.environ)
    yield
    for name in frozenset(os.environ) - before:  # a command that runs in this process sets some for its libraries
        del os.environ[name]
    if done := request.node.stash[UNMARKED].done:
        pytest.fail(f"this test needs the marker {'; '.join(done)}")


@pytest.fixture
def as_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands look for no smaller schedule, for up to 20 s; tests/commands/test_stories_of_runs.py is about that."""
    monkeypatch.setattr("kvcheck.commands.stories.look_for_smaller", lambda *_: None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """From the first fixture on, processes are forked where a test may have some, and refused where it may not."""
    unmarked = item.stash[UNMARKED] = Unmarked()
    HELD.clear()
    HELD.update(mark.name for mark in item.iter_markers())
    with pytest.MonkeyPatch.context() as patch:
        if PROCESSES in HELD and not any(mark.kwargs.get("starts") for mark in item.iter_markers(PROCESSES)):
            patch.setattr(subprocess, "Popen", ForkingPopen)
        if not HELD & {PROCESSES, COMPILED}:
            unmarked.forbid_processes(patch)
        if SCHEDULES not in HELD:
            unmarked.forbid_schedules(patch)
        return (yield)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Which whole schedules are part of `make quick`."""
    mark_one_a_bug(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what this machine cannot run."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")
    if item.get_closest_marker("mooncake") and importlib.util.find_spec("mooncake") is None:
        pytest.skip("needs the mooncake transfer engine: pip install 'kvcheck[mooncake]'")
    if item.get_closest_marker("ray") and importlib.util.find_spec("ray") is None:
        pytest.skip("needs Ray: pip install 'kvcheck[ray]'")
