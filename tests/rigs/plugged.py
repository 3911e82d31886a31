"""pytest with kvcheck's plugin in a project of its own: as if kvcheck were installed as pyproject.toml says."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parents[2]
EXAMPLE = PROJECT / "docs" / "examples" / "own-pool"


def run_pytest(folder: Path, *arguments: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
    """Run pytest in the folder. COLUMNS is wide, so that lines of its summary are whole."""
    installed = folder.parent / f"{folder.name}-installed"
    described = installed / "kvcheck_plugin-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    points = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    lines = "".join(f"{name} = {target}\n" for name, target in points.items())
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcheck-plugin\nVersion: 0\n")
    (described / "entry_points.txt").write_text(f"[pytest11]\n{lines}")
    variables = {**os.environ, "PYTHONPATH": f"{PROJECT}{os.pathsep}{installed}", "COLUMNS": str(columns)}
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "-p", "no:benchmark", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=240)
