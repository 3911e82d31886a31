"""`kvcheck probe --changed`: the cells that run what was changed in an engine, by the line map of its environment.

Cells are picked by whole files: other schedules of a cell run other lines of the same file.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvcheck.commands.terminal import complain, passing
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.probes.changed import Change, changed_files, file_of, load
from kvcheck.core.probes.frame.lines_run import from_ranges
from kvcheck.core.probes.installed import ENGINES
from kvcheck.core.probes.runner import ProbeRunner
from kvcheck.core.run.plan import Plan

MOST_FILES = 20
SEED = 1
"""Of all measurements, so that equal files have equal rows."""


def pick(given: Sequence[str], plans: Sequence[Plan], runner: ProbeRunner) -> tuple[Change, list[Plan]]:
    """Return the change and the plans that run its files, those with most of their lines first. Lines that are not
    known are measured, and the runner traces these files from now on. Raises UsageError, UnknownVerdict."""
    hello = runner.start()
    engine = f"{hello.engine} {hello.version}"
    if hello.folder is None:
        raise UsageError(f"--changed: no probe of {engine} runs Python files of its package; leave it out")
    folder = Path(hello.folder)
    files = {each.name: each for text in given for each in changed_files(text, folder)}
    change, names = Change(tuple(files.values())), [*files]
    able = [plan for plan in plans if plan.cell not in hello.absent]
    file = file_of(maps(), runner.target, runner.device)
    found = load(file, runner.target)
    if stale := found.stale(folder, able, names):
        complain(f"measuring the lines that {counted(len(stale), 'cell')} run, kept in {file}")
        found = found.measured(runner, [replace(plan, seed=SEED, schedule=0) for plan in stale], passing)
        found.save(file)
    runs = {plan: found.runs(plan.cell, names) for plan in able}
    picked = sorted((plan for plan in able if runs[plan]), key=lambda plan: -runs[plan])
    if not picked:
        probes = ", ".join(dict.fromkeys(str(plan.probe).partition(".")[0] for plan in able))
        raise UnknownVerdict(f"nothing was judged: no probe of {engine} runs {', '.join(names)}; its probes: {probes}")
    runner.traced, runner.misses = tuple(names), change.misses
    return change, picked


def maps() -> Path:
    """Return the folder of line maps."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvcheck" / "lines"


def probe_card(name: str) -> dict[str, str]:
    """Return what a probe drives and, by the newest map of its engine, the files that it runs."""
    engine, row = next((each, row) for each in ENGINES.names() if (row := ENGINES.load(each).probe(name)) is not None)
    card = {"engine": engine, "scenario": row.scenario, "drives": row.shows, "subjects": ", ".join(row.subjects)}
    files = sorted(maps().glob(f"{engine}-*.json"), key=lambda path: path.stat().st_mtime)
    found = load(files[-1], engine) if files else None
    lines: dict[str, set[int]] = {}
    for cell, ran in found.cells.items() if found is not None else ():
        if cell.rpartition("/")[2].partition(".")[0] == name:
            for file, run in ran.items():
                lines.setdefault(file, set()).update(from_ranges(run.lines))
    if found is not None and lines:
        most = sorted(lines.items(), key=lambda each: -len(each[1]))
        rows = [f"  {counted(len(each), 'line')} of {file}" for file, each in most[:MOST_FILES]]
        rows += [f"  and fewer of {counted(len(most) - MOST_FILES, 'more file')}"] * (len(most) > MOST_FILES)
        card[f"runs in {found.target}"] = "\n".join(rows)
    return card | {"see": "docs/probes.md"}
