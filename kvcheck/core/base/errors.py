"""Every exception of kvcheck and its exit code.

    KvcheckError
    +-- UsageError            2   bad argument, unknown name, bad file, unwritable folder
    +-- StorageError          2   a page store cannot keep or reach an object: disk full, store gone or closed
    +-- UnknownVerdict        4   nothing could be judged: a device or library is missing
    |   +-- HardwareError         a device reported an error of its own hardware; its process can use it no more
    +-- TargetError           1   the code under test broke a contract it states itself
    |   +-- LayoutMismatch        shapes, dtypes or buffer tables differ
    |   +-- LengthMismatch        two lists that describe one thing have two lengths
    |   +-- DoubleFree            an id was freed that is not allocated
    |   +-- FreeInFlight          an id was freed while an operation still uses it
    |   +-- ForeignAccess         an id was used for a request that does not own it
    |   +-- TransferError         one request's transfer failed; the others go on
    |   +-- WrongOutput           an arm of a benchmark left wrong bytes
    |   +-- Hang                  a wait that nothing can satisfy, or a step budget spent
    +-- InternalError         70  kvcheck itself is wrong

Invariants:
- A leaf's exit code is a class attribute; besides, `machine_trouble` and `missing_library` mean exit code 4.
- Messages name the fault, expected, got, and the command to run next if one helps.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from typing import ClassVar

LIBRARIES = ("torch", "numpy", "typer", "pandas", "matplotlib", "jinja2", "safetensors", "packaging")
CPU_BUILDS_OF_TORCH = "https://download.pytorch.org/whl/cpu"


class KvcheckError(Exception):
    exit_code: ClassVar[int] = 70


class UsageError(KvcheckError):
    exit_code = 2


class StorageError(KvcheckError):
    """An object that is not in the page store is computed again."""

    exit_code = 2


class UnknownVerdict(KvcheckError):
    exit_code = 4


class HardwareError(UnknownVerdict):
    pass


class TargetError(KvcheckError):
    exit_code = 1


class LayoutMismatch(TargetError):
    pass


class LengthMismatch(TargetError):
    pass


class DoubleFree(TargetError):
    pass


class FreeInFlight(TargetError):
    pass


class ForeignAccess(TargetError):
    pass


class TransferError(TargetError):
    pass


class WrongOutput(TargetError):
    pass


class Hang(TargetError):
    pass


class InternalError(KvcheckError):
    pass


MOST_OF_A_TEXT = 2000
"""Characters of an error's text that are kept: a finding is read in a terminal."""

_DISK = ("disk space", "set TMPDIR to a folder that has room")
_FILES = ("file descriptors", "raise the limit (ulimit -n)")
_MEMORY = ("memory", "free some, or use fewer --jobs")
_NUMBERS = {
    errno.ENOSPC: _DISK,
    errno.EDQUOT: _DISK,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: _MEMORY,
}
_TEXTS = {
    "can't allocate memory": _MEMORY,
    "cannot allocate memory": _MEMORY,
    "failed to map segment from shared object": _MEMORY,
    "bad_alloc": _MEMORY,
    "can't start new thread": _MEMORY,
    "too many open files": _FILES,
    "no space left on device": _DISK,
}
"""Texts of torch, gloo and the dynamic loader for the same errors, which come without a number."""


def why_unread(error: BaseException) -> str:
    """The reason without the file's name, which the caller prints."""
    if isinstance(error, UnicodeDecodeError):
        return f"expected UTF-8 text, got byte 0x{error.object[error.start]:02x} at {error.start}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error)


def text_of(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # of the code under test, whose error has to be reported whatever it is
        return type(error).__name__
    return text if len(text) <= MOST_OF_A_TEXT else f"{text[:MOST_OF_A_TEXT]}... ({len(text):,} characters)"


def missing_library(error: BaseException) -> str | None:
    """Name the libraries of pyproject.toml that are not installed, if that is why `error` was raised; else None."""
    if not isinstance(error, ModuleNotFoundError) or error.name not in LIBRARIES:
        return None
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    return f"this Python lacks {', '.join(missing)}, which kvcheck needs; next: {installation_of(missing)}"


def installation_of(libraries: list[str]) -> str:
    """Return the command that installs them: torch from where its build without CUDA is."""
    others = [name for name in libraries if name != "torch"]
    torch = [f"pip install torch --index-url {CPU_BUILDS_OF_TORCH}"] if "torch" in libraries else []
    return " && ".join([*torch, *([f"pip install {' '.join(others)}"] if others else [])])


def machine_trouble(error: BaseException, *, is_of_user: bool = False) -> str | None:
    """Name the resource that the machine lacks, if that is why `error` or its cause was raised; else None.

    is_of_user: the user's own code raised it; then only errors made by the interpreter, torch or numpy count.
    """
    cause: BaseException | None = error
    seen: set[int] = set()  # causes may form a ring
    while cause is not None and id(cause) not in seen:
        short = None if is_of_user and not _is_of_system(cause) else _short_of(cause)
        if short is not None:
            what, advice = short
            text = f"{type(cause).__name__}: {text_of(cause)}".strip(": ").splitlines()[0]
            return f"the machine is short of {what}, which says nothing of the code under test: {text}; next: {advice}"
        seen.add(id(cause))
        cause = cause.__cause__
    return None


def _is_of_system(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno is not None and error.strerror == os.strerror(error.errno)
    if type(error) is MemoryError:
        return not error.args
    return type(error).__module__.partition(".")[0] in ("torch", "numpy")


def _short_of(error: BaseException) -> tuple[str, str] | None:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return _MEMORY
    if isinstance(error, OSError):
        return _NUMBERS.get(error.errno or 0)
    if isinstance(error, RuntimeError | ImportError):
        said = text_of(error).lower()
        return next((short for text, short in _TEXTS.items() if text in said), None)
    return None
