"""RunStore: keeps runs as `OUT/<run_id>/run.json`, writes them whole or not at all, and finds them by name.

Invariants:
- The folder of a new run is always new, so two runs never share one.
- A file is replaced in one step. A reader sees the old text or the new text, never a mixture.
- An error of the operating system is a UsageError with the path, the reason and the option that helps.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.misspelt import did_you_mean
from kvcheck.core.base.record import RunRecord, check_run_id

RUN_FILE = "run.json"
ELSEWHERE = "choose one with --out DIR"
"""What helps where a folder cannot be written, in most commands."""
LISTED_RUNS = 5
DRAWS = 8
"""Ids tried for a new run. Two of one second share eight hex digits once in 4 billion: eight times is no chance."""


@dataclass(frozen=True, slots=True)
class RunStore:
    """The folder that holds one folder per run."""

    out: Path

    def claim(self, draw: Callable[[], str]) -> str:
        """Draw ids until one has no folder, and make that folder. Returns the id. Raises UsageError."""
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
        """`out/<run_id>/`, made if it is not there. Raises UsageError if it cannot be."""
        check_run_id(run_id)
        folder = self.out / run_id
        make_folder(folder)
        return folder

    def save(self, record: RunRecord) -> Path:
        """Write the record into its folder; the path of its run.json."""
        return write_run(record, self.folder(record.run_id))

    def run_ids(self) -> tuple[str, ...]:
        """Names of the runs kept here, sorted; none if the folder does not exist."""
        if not self.out.is_dir():
            return ()
        return tuple(sorted(entry.name for entry in self.out.iterdir() if _is_file(entry / RUN_FILE)))


def make_folder(folder: Path, *, elsewhere: str = ELSEWHERE) -> None:
    """Make `folder` and its parents. Raises UsageError with the reason. elsewhere: how another one is named."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error, elsewhere) from error


def write_text(path: Path, text: str, *, elsewhere: str = ELSEWHERE) -> None:
    """Replace `path` by `text` in one step, making its folder if needed. Raises UsageError with the reason.

    A link stays, and the file behind it is replaced. A device or a pipe is written to and stays what it is.
    """
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
    """The path of a draft beside `path`, which takes its place in one step once the block has written it.

    The folder is made if needed. Raises UsageError with the reason where anything cannot be written.
    """
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
    """Whether there is something at `path`, behind links too, that is no file and no folder: a device, a pipe."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _behind_links(path: Path) -> Path:
    """The file that a link leads to, also where it is not there yet."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def check_writable(path: Path) -> None:
    """Raise UsageError, with the reason, unless `path` can be written. A file is written to find out."""
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
    """Write run.json into `folder`; its path."""
    path = folder / RUN_FILE
    write_text(path, record.to_json())
    return path


def write_json(record: RunRecord, path: Path) -> None:
    """The record as JSON: into the file, or as run.json into an existing folder."""
    write_text(path / RUN_FILE if path.is_dir() else path, record.to_json())


def find_run(name: str, out: Path) -> Path:
    """The run.json that `name` means: a file, a folder that holds one, a run id under `out`, or the unique start of
    one."""
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
    hint = did_you_mean(name, known)
    raise UsageError(f"no run {name!r}: expected a run id, a folder or a run.json; {out} holds {_some(known)}{hint}")


def is_stored(name: str) -> bool:
    """True for the path of a file or folder that is there."""
    try:
        return Path(name).exists()
    except (OSError, ValueError):  # a name that no file system accepts, such as a long schedule line
        return False


def _is_file(path: Path) -> bool:
    """True if there is such a file and this user may see it. A name that no file system accepts has none."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _some(run_ids: tuple[str, ...] | list[str]) -> str:
    """The newest few ids, which sort last, and how many more there are."""
    shown = ", ".join(run_ids[-LISTED_RUNS:])
    return shown if len(run_ids) <= LISTED_RUNS else f"{shown} and {len(run_ids) - LISTED_RUNS} more"


def _unwritable(path: Path, error: OSError, elsewhere: str = ELSEWHERE) -> UsageError:
    reason = error.strerror or str(error)
    return UsageError(f"cannot write {path}: {reason}; expected a folder that can be written: {elsewhere}")


def _discard(draft: Path) -> None:
    """Remove a draft that was not renamed; a file system that is gone is ignored."""
    try:
        draft.unlink(missing_ok=True)
    except OSError:
        return
