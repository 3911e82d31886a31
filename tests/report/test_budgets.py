"""Budget files: what is read, what it covers, and what is refused with one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
from rigs.gate import bench_row

from kvcheck.core.base.errors import UsageError
from kvcheck.core.report.gate.budgets import Budget, read_budgets

GOOD = 'case = "read"\narm = "packed"\nbaseline = "views"\n'


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "budgets.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_budget_file_is_read_in_its_order(tmp_path: Path) -> None:
    text = f'[[budget]]\n{GOOD}max_ratio = 2\n[[budget]]\n{GOOD}size = "4 KiB"\nmin_limit_ratio = 0.8\n'
    assert read_budgets(written(tmp_path, text)) == (
        Budget(case="read", arm="packed", baseline="views", max_ratio=2.0),
        Budget(case="read", arm="packed", baseline="views", size="4 KiB", min_limit_ratio=0.8),
    )


@pytest.mark.parametrize(
    ("changed", "is_covered"),
    [
        ({}, True),
        ({"size": "row", "shape": "glm-5.1", "device": "cpu"}, True),
        ({"size": "rows"}, False),
        ({"device": "cuda:0"}, False),
        ({"case": "write"}, False),
        ({"baseline": "clones"}, False),
    ],
)
def test_a_budget_covers_the_rows_it_names(changed: dict[str, str], is_covered: bool) -> None:
    budget = Budget(**({"case": "read", "arm": "packed", "baseline": "views"} | changed), max_ratio=1.0)
    assert budget.covers(bench_row()) is is_covered


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"expected at least one \[\[budget\]\] table"),
        ("budget = 3", r"expected at least one \[\[budget\]\] table"),
        (f"[budget]\n{GOOD}max_ratio = 1", "in double brackets"),
        (f"[[budgets]]\n{GOOD}max_ratio = 1", "unknown key 'budgets'"),
        (f"[[budget]]\n{GOOD}max_ration = 1", "budget 1: .*did you mean 'max_ratio'"),
        (f'[[budget]]\n{GOOD}max_ratio = 1\n[[budget]]\ncase = "x"', "budget 2: the key 'arm' is missing"),
        (f"[[budget]]\n{GOOD}", "expected max_ratio or min_limit_ratio, got none"),
        (f"[[budget]]\n{GOOD}max_ratio = 0", "above 0 and at most 1,000,000, got '0'"),
        (f"[[budget]]\n{GOOD}max_ratio = nan", "expected a number above 0"),
        (f"[[budget]]\n{GOOD}max_ratio = {'9' * 400}", "expected a number above 0"),
        (f"[[budget]]\n{GOOD}max_ratio = true", "expected a number above 0 and at most 1,000,000, got 'True'"),
        (f'[[budget]]\n{GOOD}min_limit_ratio = "0.8"', "min_limit_ratio: expected a number above 0"),
        (f"[[budget]]\n{GOOD}size = 4096\nmax_ratio = 1", "size: expected a name in quotes, got '4096'"),
        (f"[[budget]]\n{GOOD}max_ratio = 1\n" * 2, "budget 2: read: packed over views has a budget already"),
        ("[[budget", "expected a TOML file"),
        (b"\xff\xfe", "expected a TOML file"),
        ("a = " + "[" * 5000, "expected a TOML file"),
    ],
)
def test_a_budget_file_that_is_not_right_is_refused(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError, match=message) as refused:
        read_budgets(path)
    assert str(path) in str(refused.value)
    with pytest.raises(UsageError, match="expected a TOML file"):
        read_budgets(tmp_path / "missing.toml")
