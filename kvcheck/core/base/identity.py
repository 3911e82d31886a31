"""Identity: digests of the code, trace and engine that a run judges.

Invariants:
- The same files have the same digest wherever they lie and however they were installed; versions are not used.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import kvcheck
from kvcheck.core.base.errors import UsageError

DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{28,}\b")
MOONCAKE_BUILDS = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
"""Distributions of Mooncake's one library. They overwrite each other's files."""
GIT_PATIENCE_S = 10.0
"""A working tree on a slow file system may take longer; then the digest of the files has to do."""


@cache
def code_digest() -> str:
    return folder_digest(Path(kvcheck.__file__).parent)


def folder_digest(folder: Path) -> str:
    """SHA-256 over the path and content of every .py file in `folder`, in the order of their paths."""
    found = hashlib.sha256()
    for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.py") if path.is_file()):
        content = (folder / name).read_bytes()
        # Both lengths are hashed too, so no path can be taken for content.
        found.update(f"{len(name)} {len(content)} {name}".encode("utf-8", "surrogateescape"))
        found.update(content)
    return found.hexdigest()


def file_digest(path: Path, advice: str = "expected a file") -> str:
    """Raises UsageError, which ends in the advice."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}; {advice}") from error


def short(text: str | None) -> str:
    return "n/a" if text is None else DIGEST.sub(r"\1", text)


def commit_of(folder: Path) -> str | None:
    """The commit of the folder's files, with " and changes" if they differ from it; None without git."""
    if not git(folder, "ls-files", "--", "."):  # an ignored folder may lie in another project's tree
        return None
    commit = git(folder, "rev-parse", "HEAD")
    changes = git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    return None if not commit or changes is None else f"{commit}{' and changes' if changes else ''}"


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in the folder; None if git is missing or fails."""
    program = shutil.which("git")
    if program is None:
        return None
    command = [program, "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    variables = {"PATH": os.defpath, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"}  # GIT_DIR of a hook names another tree
    try:
        done = subprocess.run(
            command, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode("utf-8", "replace").strip() if done.returncode == 0 else None
