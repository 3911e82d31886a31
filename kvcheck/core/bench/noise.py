"""How busy the machine is: readings before and after a run, for its record.

The pressure file gives the share of time in which some task had to wait for a core. Stolen time does not include other
tasks, and load averages lag. A reading that this system does not have is None, never 0.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

PRESSURE_FILE = Path("/proc/pressure/cpu")
CPU_FILE = Path("/proc/cpuinfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def noise() -> dict[str, object]:
    return {
        "pressure_some_avg10_percent": _pressure(),
        "load_average": list(os.getloadavg()),
        "involuntary_switches": resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw,
    }


def machine() -> dict[str, object]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    return {"cpu_model": _cpu_model(), "cores_allowed": cores, "caches": _caches(), "threads": 1}


def _pressure() -> float | None:
    text = _text(PRESSURE_FILE)
    for part in text.split() if text is not None else ():
        if part.startswith("avg10="):
            return float(part.removeprefix("avg10="))
    return None


def _cpu_model() -> str | None:
    for line in (_text(CPU_FILE) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return None


def _caches() -> dict[str, str] | None:
    found = {}
    for folder in sorted(CACHES.glob("index*")):
        level, kind, size = (_text(folder / name) for name in ("level", "type", "size"))
        if level and kind and size:
            found[f"L{level.strip()} {kind.strip().lower()}"] = size.strip()
    return found or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
