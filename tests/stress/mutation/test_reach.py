"""Reach: counted statements are those that ran, and schedules come in the order of their worth."""

from __future__ import annotations

import ast

from kvcheck.core.stress.mutation.edits import package_folder, read_sources
from kvcheck.core.stress.mutation.reach import CellReach, Reach, counted, taken

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

class A:
    M = 2
    def h(self):
        with open(__file__):
            yield 1
'''


def run_counted(**arguments: object) -> tuple[object, list[int]]:
    """What f returns, and the lines that it notes."""
    values: dict[str, object] = {"__name__": "counted"}
    code = compile(counted(ast.parse(TEXT), "core/cache/a.py"), "a.py", "exec", dont_inherit=True)
    run = type(lambda: None)(code, values)  # runs the module without exec, which this project bans
    run()
    taken()
    value = values["f"](**arguments)  # type: ignore[operator]
    return value, taken().get("core/cache/a.py", [])


def test_statements_are_noted_by_their_first_line_and_mean_what_they_meant() -> None:
    assert run_counted(a=1) == (7, [7, 8, 9, 10, 11, 14, 16, 17, 19, 21, 22])
    assert run_counted(a=0) == (7, [7, 10, 12, 13, 14, 16, 17, 19, 21, 22])
    assert taken() == {}, "they were taken"


def test_every_module_of_the_cache_compiles_with_notes() -> None:
    for file, text in read_sources(package_folder()).items():
        tree = counted(ast.parse(text), file)
        compile(tree, file, "exec", dont_inherit=True)
        assert sum("_seen_lines_" in ast.dump(each) for each in ast.walk(tree)) > 1


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


def test_cells_begin_at_different_schedules_of_the_floor() -> None:
    reach = Reach([cell(name, {3: 0b1111}) for name in ("a", "b", "c", "d")] + [cell("few", {3: 0b1000})])
    runs = reach.runs(reach.of("core/cache/a.py", 3, 3), 6, floor=3)
    firsts = {name: [number for each, number in runs if each == name] for name in ("a", "b", "c", "d", "few")}
    assert firsts["a"] == firsts["d"] == [0, 1, 2, 3, 4, 5]
    assert (firsts["b"], firsts["c"]) == ([1, 2, 0, 3, 4, 5], [2, 0, 1, 3, 4, 5])
    assert sorted(firsts["few"]) == [3, 4, 5]
