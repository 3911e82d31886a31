"""Reach: noted lines are those that functions of the cache run, and schedules come in the order of their worth."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from kvcheck.core.probes.frame.lines_run import lines_of
from tools.mutation.reach import CellReach, Reach

TEXT = '''\
"""A module."""
from __future__ import annotations
N = 1

def f(a):
    """Text."""
    def g():
        nonlocal a
        a += 1
    if a:
        g()
    elif N:
        a = 2
    for b in [c
              for c in range(a)]:
        try:
            raise ValueError
        except ValueError:
            continue
        finally:
            a = 7
    return (
        a)

def late():
    class A:
        M = 2
    raise KeyError
'''


def loaded(folder: Path) -> ModuleType:
    """TEXT as a module, of a file in the folder."""
    path = folder / "a.py"
    path.write_text(TEXT)
    spec = spec_from_file_location("a", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("given", "lines"),
    [(1, {7, 9, 10, 11, 14, 15, 16, 17, 18, 19, 21, 22, 23}), (0, {7, 10, 12, 13, 14, 15, 16, 17, 18, 19, 21, 22, 23})],
)
def test_lines_that_functions_run_are_noted(given: int, lines: set[int], tmp_path: Path) -> None:
    module = loaded(tmp_path)
    assert lines_of(lambda: module.f(given), tmp_path) == (7, {"a.py": lines})
    assert lines_of(lambda: module.f(given), tmp_path / "below") == (7, {}), "a file elsewhere"


def test_the_body_of_a_class_is_no_function_and_a_failure_ends_the_notes(tmp_path: Path) -> None:
    module = loaded(tmp_path)

    def caught() -> None:
        with pytest.raises(KeyError):
            module.late()

    assert lines_of(caught, tmp_path)[1] == {"a.py": {26, 28}}
    before = sys.gettrace()
    with pytest.raises(KeyError):
        lines_of(module.late, tmp_path)
    assert sys.gettrace() is before


def cell(name: str, lines: dict[int, int], *, cost: int = 100, file: str = "core/cache/a.py") -> CellReach:
    return CellReach(cell=name, costs=(cost,) * 4, cpu_s=(1.0,) * 4, lines={file: lines})


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


def test_cells_begin_at_different_schedules_of_the_floor() -> None:
    reach = Reach([cell(name, {3: 0b1111}) for name in ("a", "b", "c", "d")] + [cell("few", {3: 0b1000})])
    runs = reach.runs(reach.of("core/cache/a.py", 3, 3), 6, floor=3)
    firsts = {name: [number for each, number in runs if each == name] for name in ("a", "b", "c", "d", "few")}
    assert firsts["a"] == firsts["d"] == [0, 1, 2, 3, 4, 5]
    assert (firsts["b"], firsts["c"]) == ([1, 2, 0, 3, 4, 5], [2, 0, 1, 3, 4, 5])
    assert sorted(firsts["few"]) == [3, 4, 5]
