"""RunStore: keeps runs as `OUT/<run_id>/run.json` and finds them by name.

Invariants:
- A file is replaced in one step.
- An error of the operating system becomes a UsageError with path, reason and the option that helps.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import RunRecord, check_run_id, read_record
from kvcheck.core.base.registry import did_you_mean

RUN_FILE = "run.json"
ELSEWHERE = "choose one with --out DIR"
LISTED_RUNS = 5
DRAWS = 8
"""Ids tried for a new run. Two of one second share eight hex digits once in 4 billion, never eight times."""

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class RunStore:
    out: Path

    def claim(self, draw: Callable[[], str]) -> str:
        make_folder(self.out)
        run_id = ""
        for _ in range(DRAWS):
            run_id = draw()
            check_run_id(run_id)
            try:
                (self.out / run_id).mkdir()
            except FileExistsError:
                continue
            except OSError as error:
                raise _unwritable(self.out / run_id, error) from error
            return run_id
        raise UsageError(
            f"{self.out}: expected an id that no run has, got one that is taken {DRAWS} times, last {run_id}; "
            "choose another folder with --out DIR"
        )

    def folder(self, run_id: str) -> Path:
        check_run_id(run_id)
        folder = self.out / run_id
        make_folder(folder)
        return folder

    def save(self, record: RunRecord) -> Path:
        return write_run(record, self.folder(record.run_id))

    def run_ids(self) -> tuple[str, ...]:
        if not self.out.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self.out.iterdir() if _is_file(entry / RUN_FILE)))

    def newest_first(self, skipped: Callable[[UsageError], None]) -> Iterator[tuple[Path, RunRecord]]:
        """Yield the files and the records of runs. skipped: receives why one cannot be read."""
        for run_id in reversed(self.run_ids()):
            path = self.out / run_id / RUN_FILE
            try:
                yield path, read_record(path)
            except UsageError as error:
                skipped(error)


def make_folder(folder: Path, *, elsewhere: str = ELSEWHERE) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error, elsewhere) from error


def write_text(path: Path, text: str, *, elsewhere: str = ELSEWHERE) -> None:
    """Replace `path` in one step, creating its folder. For a link, the file behind it is replaced. A device or pipe is
    written to directly."""
    # A lone surrogate, from an argument that is not UTF-8, is written as \udcXX: to JSON that is the same string.
    raw = text.encode("utf-8", errors="backslashreplace")
    if _is_stream(path):
        try:
            path.write_bytes(raw)
        except OSError as error:
            raise _unwritable(path, error, elsewhere) from error
        return
    with replacing(path, elsewhere=elsewhere) as draft, draft.open("xb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def replacing(path: Path, *, elsewhere: str = ELSEWHERE) -> Iterator[Path]:
    target = _behind_links(path)
    make_folder(target.parent, elsewhere=elsewhere)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        yield draft
        os.replace(draft, target)
    except OSError as error:
        raise _unwritable(path, error, elsewhere) from error
    finally:
        _discard(draft)


def _is_stream(path: Path) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _behind_links(path: Path) -> Path:
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_writable(path: Path) -> None:
    """Raise UsageError unless `path` can be written. Creates and removes a file to find out."""
    if path.is_dir():
        raise UsageError(f"cannot write {path}: expected the name of a file, got a folder")
    if _is_stream(path):
        return
    target = _behind_links(path)
    make_folder(target.parent)
    draft = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        draft.touch(exist_ok=False)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        _discard(draft)


def write_run(record: RunRecord, folder: Path) -> Path:
    path = folder / RUN_FILE
    write_text(path, record.to_json())
    return path


def writer_of(text_of: Callable[[S], str]) -> Callable[[S, Path], None]:
    """Return the function that writes the text of a subject to a path."""
    return lambda subject, path: write_text(path, text_of(subject))


def write_json(record: RunRecord, path: Path) -> None:
    write_text(path / RUN_FILE if path.is_dir() else path, record.to_json())


def find_run(name: str, out: Path) -> Path:
    """Return the run.json named by a file, a folder, or a unique prefix of a run id under `out`."""
    if name:
        given = Path(name)
        for path in (given, given / RUN_FILE, out / name / RUN_FILE):
            if _is_file(path):
                return path
    known = RunStore(out).run_ids()
    matching = [run_id for run_id in known if name and run_id.startswith(name)]
    if len(matching) == 1:
        return out / matching[0] / RUN_FILE
    if matching:
        raise UsageError(f"run {name!r} is ambiguous under {out}: {_some(matching)}; give more of the id")
    if not known:
        raise UsageError(
            f"no run {name!r}: expected a run id, a folder or a run.json, and {out} holds no runs; "
            "make one with `kvcheck stress`, or name their folder with --out DIR"
        )
    hint = f"{did_you_mean(name, known)}; runs kept elsewhere need --out DIR"
    raise UsageError(f"no run {name!r}: expected a run id, a folder or a run.json; {out} holds {_some(known)}{hint}")


def is_stored(name: str) -> bool:
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # a name that no file system accepts, such as a long schedule line
        return False


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _some(run_ids: tuple[str, ...] | list[str]) -> str:
    shown = ", ".join(run_ids[-LISTED_RUNS:])
    return shown if len(run_ids) <= LISTED_RUNS else f"{shown} and {len(run_ids) - LISTED_RUNS} more"


def _unwritable(path: Path, error: OSError, elsewhere: str = ELSEWHERE) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"cannot write {path}: {reason}; expected a folder that can be written: {elsewhere}")


def _discard(draft: Path) -> None:
    try:
        draft.unlink(missing_ok=True)
    except OSError:
        return
