"""A schedule under torch's profiler: one file for Perfetto and chrome://tracing, with operations by their names.

Invariants:
- A file is written whole or not at all, also if the schedule fails.
"""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable
from pathlib import Path

import torch

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.backend import ChunkWork, Operation, Signal
from kvcheck.core.cache.backend.scoped import PassingBackend
from kvcheck.core.run.outcome import Outcome
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.runner import ScheduleRunner


class MarkedBackend(PassingBackend):
    def submit(self, operation: Operation, **given: object) -> Signal:
        stage = operation.stage
        named = dataclasses.replace(
            operation,
            chunks=_marked(operation.name, operation.chunks),
            stage=None if stage is None else lambda: _marked(operation.name, stage()),
        )
        return self.inner.submit(named, **given)  # type: ignore[arg-type]


def profile(runner: ScheduleRunner, plan: Plan, path: Path) -> Outcome:
    """Run the plan once, and write its profile. Raises UsageError if the file cannot be written."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if plan.backend == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        if path.is_dir() or not path.name:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_bytes(b"")  # before the run, which may take minutes
    except OSError as error:
        raise UsageError(f"--profile: cannot write {path}: {error.strerror}; name a file in another folder") from error
    # Lanes may be threads that began before the profile, or begin in it.
    all_threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    try:
        with torch.profiler.profile(activities=kinds, experimental_config=all_threads, acc_events=True) as seen:
            outcome = runner.run(plan, around=MarkedBackend)
        seen.export_chrome_trace(str(draft))
        draft.replace(path)
    except OSError as error:
        raise UsageError(f"--profile: cannot write {path}: {error.strerror}; name a file in another folder") from error
    finally:
        draft.unlink(missing_ok=True)
    return outcome


def _marked(name: str, chunks: tuple[ChunkWork, ...]) -> tuple[ChunkWork, ...]:
    def marked(chunk: ChunkWork) -> Callable[[], None]:
        def run() -> None:
            with torch.profiler.record_function(name):
                chunk()

        return run

    return tuple(map(marked, chunks))
