"""Reports: one RunRecord in, one file or folder out, one module per format.

Invariants:
- A writer is `write(record, path)`. It reads only the record and replaces each file in one step.
- Importing this package imports no writer: pandas, matplotlib and jinja2 load when their format is requested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvcheck.core.base.record import Finding, RunRecord
from kvcheck.core.base.registry import Registry
from kvcheck.core.report.gate.result import GateResult

if TYPE_CHECKING:
    from kvcheck.core.report.comparison.changes import Changes
    from kvcheck.core.report.comparison.compare import Comparison

WRITERS: Registry[Callable[[RunRecord, Path], None]] = Registry(
    "format",
    {
        "json": (
            "kvcheck.core.run.store:write_json",
            "Writes the whole record as one JSON file; in a folder it is run.json.",
        ),
        "csv": ("kvcheck.core.report.to_csv:write", "Writes one table into a .csv file, or seven into a folder."),
        "html": ("kvcheck.core.report.to_html:write", "Writes one page; in a folder it is report.html."),
        "junit": (
            "kvcheck.core.report.ci.to_junit:write",
            "Writes JUnit XML: a test case for each cell; UNKNOWN is an error. In a folder it is junit.xml.",
        ),
        "ctrf": (
            "kvcheck.core.report.ci.to_ctrf:write",
            "Writes CTRF, the JSON of CI dashboards; UNKNOWN is other. In a folder it is ctrf-report.json.",
        ),
        "github": (
            "kvcheck.core.report.ci.to_github:write",
            "Writes workflow commands of GitHub Actions. github=- prints them, and adds to $GITHUB_STEP_SUMMARY.",
        ),
        "gitlab": (
            "kvcheck.core.report.ci.to_gitlab:write",
            "Writes GitLab's code quality JSON; in a folder it is gl-code-quality-report.json.",
        ),
        "sarif": (
            "kvcheck.core.report.ci.to_sarif:write",
            "Writes SARIF 2.1.0 with cells as logical locations; in a folder it is kvcheck.sarif.",
        ),
    },
)

GATE_WRITERS: Registry[Callable[[GateResult, Path], None]] = Registry(
    "format of the gate",
    {
        "json": "kvcheck.core.report.gate.result:write_json",
        "md": (
            "kvcheck.core.report.gate.pages:write_markdown",
            "Writes a Markdown page: of a gate's result, or of several runs that kvcheck report compares.",
        ),
        "html": "kvcheck.core.report.gate.pages:write",
        "junit": "kvcheck.core.report.ci.to_junit:write",
        "ctrf": "kvcheck.core.report.ci.to_ctrf:write",
        "github": "kvcheck.core.report.ci.to_github:write",
        "gitlab": "kvcheck.core.report.ci.to_gitlab:write",
        "sarif": "kvcheck.core.report.ci.to_sarif:write",
    },
)

COMPARISON_WRITERS: Registry[Callable[[Comparison, Path], None]] = Registry(
    "format of a comparison",
    {
        "csv": "kvcheck.core.report.comparison.pages:write_csv",
        "md": "kvcheck.core.report.comparison.pages:write_markdown",
        "html": "kvcheck.core.report.comparison.pages:write",
    },
)

CHANGES_WRITERS: Registry[Callable[[Changes, Path], None]] = Registry(
    "format of changes", {"json": "kvcheck.core.report.comparison.changes:write_json"}
)

STORY_WRITERS: Registry[Callable[[Finding, Path], None]] = Registry(
    "format of a story",
    {"perfetto": ("kvcheck.core.report.to_perfetto:write", "Writes a trace: lanes as threads, waits as arrows.")},
)

# Files that a writer puts into a folder, listed here so that a path can be checked without loading a writer.
FILES = {
    "json": ("run.json",),
    "csv": ("findings.csv", "scenarios.csv", "words.csv", "observed.csv", "situations.csv", "mutants.csv", "bench.csv"),
    "html": ("report.html",),
    "junit": ("junit.xml",),
    "ctrf": ("ctrf-report.json",),
    "github": ("github.txt",),
    "gitlab": ("gl-code-quality-report.json",),
    "sarif": ("kvcheck.sarif",),
}

ENDINGS = {"ctrf": "ctrf.json", "junit": "junit.xml", "github": "github.txt", "gitlab": "gitlab.json"}
"""Endings of file names, for formats whose ending is not the format's name."""

STDOUT = Path("-")
"""Path of stdout, for the format github only."""


def one_file(format_name: str, path: Path) -> Path:
    return path / FILES[format_name][0] if path.is_dir() else path


def destinations(format_name: str, path: Path) -> tuple[Path, ...]:
    """Return the files that a format's writer replaces for `path`; none for stdout."""
    if path == STDOUT:
        return ()
    if (path.is_dir() and format_name in FILES) or (format_name == "csv" and path.suffix.lower() != ".csv"):
        return tuple(path / name for name in FILES[format_name])
    return (path,)
