"""Identity of a run in its record: its id, the tool, and the machine."""

from __future__ import annotations

import os
import platform
import secrets
from datetime import UTC, datetime
from importlib import metadata

from kvcheck import __version__
from kvcheck.core.base.identity import MOONCAKE_BUILDS


def new_run_id() -> str:
    """Date, time and eight random hex digits: ids sort by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(4)}"


def tool() -> dict[str, str]:
    return {"name": "kvcheck", "version": __version__}


def environment() -> dict[str, object]:
    versions: dict[str, str | None] = {}
    for name in ("torch", "numpy", "triton", *MOONCAKE_BUILDS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    if found := [name for name in MOONCAKE_BUILDS if versions[name] is not None]:  # builds of one library
        versions = {name: version for name, version in versions.items() if name not in MOONCAKE_BUILDS or name in found}
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "packages": versions,
    }
