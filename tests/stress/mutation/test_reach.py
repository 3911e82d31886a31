"""Reach: traced lines are those that ran, and schedules come in the order of their worth."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from kvcheck.core.stress.mutation.reach import CellReach, LineTrace, Reach

TEXT = """\
def f(a):
    if a:
        b = 1
    else:
        b = 2
    return [c for c in range(b)]


def g():
    return f(0)
"""


@pytest.fixture
def traced(tmp_path: Path) -> ModuleType:
    """A module below the traced folder."""
    path = tmp_path / "core" / "traced.py"
    path.parent.mkdir()
    path.write_text(TEXT)
    spec = spec_from_file_location("traced", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_lines_that_ran_are_seen_anew_each_time(tmp_path: Path, traced: ModuleType) -> None:
    trace = LineTrace(tmp_path, "core")
    before = sys.gettrace()
    with trace.tracing() as first:
        traced.f(1)
        traced.f(1)
    with trace.tracing() as second:
        traced.g()
    assert first == {"core/traced.py": {2, 3, 6}}
    assert second == {"core/traced.py": {2, 5, 6, 10}}
    assert sys.gettrace() is before


def test_other_folders_are_not_traced(tmp_path: Path, traced: ModuleType) -> None:
    with LineTrace(tmp_path, "other").tracing() as seen:
        traced.f(1)
    assert seen == {}


def cell(name: str, lines: dict[int, int], *, cost: int = 100, file: str = "core/cache/a.py") -> CellReach:
    return CellReach(cell=name, line=name, costs=(cost,) * 4, cpu_s=(1.0,) * 4, lines={file: lines})


def test_a_span_is_reached_by_the_schedules_of_any_of_its_lines() -> None:
    reach = Reach([cell("one", {3: 0b0001, 5: 0b0100}), cell("two", {9: 0b1111})])
    assert reach.of("core/cache/a.py", 3, 5) == {"one": 0b0101}
    assert reach.of("core/cache/a.py", 6, 8) == {}
    assert reach.of("core/cache/b.py", 1, 9) == {}


def test_lines_outside_functions_are_reached_with_their_file() -> None:
    reach = Reach([cell("one", {3: 0b0001}), cell("two", {9: 0b1111}, file="core/cache/b.py")])
    assert reach.of("core/cache/a.py", 0, 0) == {"one": 0b0001}
    assert reach.of("core/cache/names.py", 0, 0) == {"one": 0b1111, "two": 0b1111}, "a file without a function that ran"


def test_cheap_cells_that_hit_often_come_first_and_misses_are_left_out() -> None:
    reach = Reach([cell("dear", {3: 0b1111}, cost=900), cell("cheap", {3: 0b1111}), cell("rare", {3: 0b1000})])
    runs = reach.runs(reach.of("core/cache/a.py", 3, 3), 6)
    assert runs[:2] == [("cheap", 0), ("cheap", 1)]
    assert runs.index(("rare", 3)) < runs.index(("dear", 0)) < runs.index(("cheap", 3))
    assert [number for name, number in runs if name == "rare"] == [3, 4, 5], "traced schedules that miss run as ever"
    assert len(runs) == 6 + 6 + 3
