"""Options that several commands share, their checks, and the environment facts of a record.

Invariants:
- A bad value is one UsageError line that says what was expected and found.
- The environment is read here and nowhere below.
"""

from __future__ import annotations

import os
import platform
import secrets
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from kvcheck import __version__
from kvcheck.core.errors import UsageError

DEFAULT_OUT = Path("reports/runs")
FORMATS = ("text", "json")


def new_run_id() -> str:
    """Date, time and four random hex digits."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def draw_seed() -> int:
    """A seed for a run that names none; it is printed and recorded."""
    return secrets.randbelow(1_000_000)


def tool() -> dict[str, str]:
    """Name and version of what made a record."""
    return {"name": "kvcheck", "version": __version__}


def environment() -> dict[str, object]:
    """Facts that a reader needs to judge a record."""
    versions: dict[str, str | None] = {}
    for name in ("torch", "numpy", "triton", "mooncake-transfer-engine"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
    }


def check_positive(name: str, value: float | None) -> None:
    """Raise UsageError unless the value is absent or at least 1 (times: above 0)."""
    least = 0.001 if name == "--max-time" else 1
    if value is not None and not value >= least:  # written so that nan is refused
        raise UsageError(f"{name}: expected at least {least}, got {value}")


def check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    """Raise UsageError unless the value is one of the known ones."""
    if value not in known:
        raise UsageError(f"{name}: expected one of {', '.join(known)}, got {value!r}")
