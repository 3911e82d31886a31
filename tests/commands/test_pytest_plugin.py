"""pytest --kvcheck in a project of its own: what is skipped, shown, kept and recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rigs.plugged import run_pytest

from kvcheck.commands.main import run
from kvcheck.core.base.record import Verdict, read_record

pytestmark = pytest.mark.processes

POOL = """
import pytest
import torch
from kvcheck.testing import check_round_trip, waits

class Pool:
    def __init__(self):
        self.k, self.k_scale = torch.zeros(31, 4), torch.zeros(31, 2)
    def save(self, ids):
        return self.k[ids], self.k_scale[ids]
    def load(self, copy, ids):
        self.k[ids], self.k_scale[ids] = copy

class Forgets(Pool):
    def load(self, copy, ids):
        self.k[ids] = copy[0]
"""
NOTHING_ASKED = """
import sys
def test_plain():
    assert not {"torch", "typer", "kvcheck.testing", "kvcheck.commands.pytest_run"} & {*sys.modules}
"""
SEEDED = """
import pathlib
@pytest.mark.kvcheck_schedules(5)
@pytest.mark.parametrize("size", [1, 2])
def test_seeds(kvcheck_pool, kvcheck_seed, size):
    with open("order.txt", "a") as order:
        order.write(f"{size}:{kvcheck_seed} ")
    is_bad = size == 2 and kvcheck_seed == 3 and not pathlib.Path("fixed").exists()
    pool = (Forgets if is_bad else Pool)()
    kvcheck_pool.round_trip(pool, save=pool.save, load=pool.load, slots=31)
"""


def project(folder: Path, body: str) -> Path:
    """A folder with one file of tests."""
    made = folder / "project"
    made.mkdir(exist_ok=True)
    (made / "test_it.py").write_text(body)
    return made


def order_of(folder: Path) -> list[str]:
    """Which runs of test_seeds there were since the last call."""
    path = folder / "order.txt"
    text = path.read_text()
    path.unlink()
    return text.split()


@pytest.mark.processes(starts=True)  # a forked process has torch
def test_without_the_option_nothing_is_imported_and_who_asks_is_skipped(tmp_path: Path) -> None:
    done = run_pytest(project(tmp_path, NOTHING_ASKED), "-q", "--strict-markers")
    assert done.returncode == 0, done.stdout
    asking = (
        "import pytest\n@pytest.mark.kvcheck_schedules(3)\ndef test_a(): 1 / 0\n"
        "def test_b(kvcheck_pool): 1 / 0\ndef test_c(): pass\n"
    )
    done = run_pytest(project(tmp_path, asking), "-q", "--strict-markers")
    assert done.returncode == 0 and "1 passed, 2 skipped" in done.stdout
    assert "kvcheck: 2 tests skipped: needs pytest --kvcheck" in done.stdout, "without -rs"


def test_a_failure_is_the_finding_and_other_tests_are_as_they_were(tmp_path: Path) -> None:
    body = POOL + (
        "def test_red(kvcheck_pool):\n    pool = Forgets()\n"
        "    kvcheck_pool.round_trip(pool, save=pool.save, load=pool.load, slots=31)\n"
        "def test_plain():\n    assert 1 == 2\n"
        "def test_nothing(kvcheck_pool):\n    pass\n"
        "def test_wrong(kvcheck_pool):\n    kvcheck_pool.round_trip(Pool(), save=len, load=len, slots=30)\n"
    )
    done = run_pytest(project(tmp_path, body), "-q", "--kvcheck")
    red, plain, nothing, wrong = re.split(r"^_+ test_\w+ _+$", done.stdout, flags=re.MULTILINE)[1:]
    assert done.returncode == 1 and red.startswith("\nKV304 buffer not moved\n  where   k_scale"), done.stdout
    assert "request 3's bytes" in red and "kvcheck explain KV304" in red and "def " not in red and "Finding(" not in red
    line = body[: body.index("slots=31")].count("\n") + 1
    assert re.search(rf"^  called  save\(\[.+\]\); load\(copy, \[.+\]\)$.*^test_it.py:{line}: ", red, re.M | re.S)
    assert ">       assert 1 == 2" in plain, "pytest's own"
    assert "the test asks for kvcheck and judged nothing" in nothing
    assert "k [31, 4] has no dimension of 30 slots" in wrong
    assert "FAILED test_it.py::test_red - KV304 buffer not moved" in done.stdout


RAISES = """
from kvcheck.testing import streams

class Raises(Pool):
    def save(self, ids):
        return [self.k[ids + 31]]

@pytest.mark.parametrize("kind", [Forgets, Raises])
def test_plain(kind):
    pool = kind()
    check_round_trip(pool, save=pool.save, load=pool.load, slots=31)
def test_late():
    with streams(device="cpu"):
        pool = Raises()
        check_round_trip(pool, save=pool.save, load=pool.load, slots=31)
def test_not_judged():
    check_round_trip(Pool(), save=len, load=len, slots=30)
@pytest.mark.skip(reason="no device")
def test_skipped(kvcheck_pool): pass
"""


@pytest.mark.parametrize("option", [(), ("--kvcheck",)], ids=["plain", "kvcheck"])
def test_a_traceback_has_lines_of_the_user_alone(tmp_path: Path, option: tuple[str, ...]) -> None:
    done = run_pytest(project(tmp_path, POOL + RAISES), "-q", *option)
    assert done.returncode == 1 and "4 failed, 1 skipped" in done.stdout, done.stdout
    shown = {*re.findall(r"^(?:.*/)?([\w.-]+\.py):\d+: ", done.stdout, re.M)}
    assert shown == {"test_it.py", "_ops.py"}, "the user's lines, and one of torch's below a late copy"
    assert ("kvcheck: 1 test skipped: no device" in done.stdout) is bool(option)
    whole = run_pytest(project(tmp_path, POOL + RAISES), "-q", "--full-trace").stdout
    assert "kvcheck/testing/round_trip.py" in whole and "kvcheck/core/probes/frame/cuda_streams.py" in whole


def test_a_debugger_stops_in_the_test(tmp_path: Path) -> None:
    body = "def test_red():\n    pool = Forgets()\n    here = 7351\n"
    body += "    check_round_trip(pool, save=pool.save, load=pool.load, slots=31)\n"
    debugger = (
        "import pdb\nclass Stops(pdb.Pdb):\n    def cmdloop(self):\n        print('here', self.curframe.f_lineno)\n"
    )
    folder = project(tmp_path, POOL + body)
    (folder / "stops.py").write_text(debugger)
    done = run_pytest(folder, "-q", "--kvcheck", "--pdb", "--pdbcls", "stops:Stops")
    line = (POOL + body).splitlines().index("    check_round_trip(pool, save=pool.save, load=pool.load, slots=31)") + 1
    assert f"here {line}\n" in done.stdout, done.stdout


def test_a_finding_fits_the_terminal(tmp_path: Path) -> None:
    done = run_pytest(project(tmp_path, POOL + SEEDED), "-q", "--kvcheck", columns=72)
    start = done.stdout.index("KV304")
    lines = done.stdout[start : done.stdout.index("  more", start)].splitlines()
    assert max(map(len, lines)) <= 72 and any(line.startswith(" " * 10) for line in lines)


SAME = """
@pytest.mark.kvcheck_schedules(4)
@pytest.mark.parametrize("name", ["a", "b"])
def test_red(kvcheck_pool, kvcheck_seed, name):
    pool = Forgets()
    if kvcheck_seed == 2:
        pool.load = lambda copy, ids: Pool.load(pool, copy, ids.flip(0))
    kvcheck_pool.round_trip(pool, save=pool.save, load=pool.load, slots=31)
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_one_finding_under_several_seeds_is_printed_whole_once(tmp_path: Path, workers: tuple[str, ...]) -> None:
    folder = project(tmp_path, POOL + SAME)
    done = run_pytest(folder, "-q", "--kvcheck", "--junitxml=junit.xml", *workers)
    printed, summary = done.stdout.split("short test summary info")
    assert done.returncode == 1 and printed.count("  where   ") == 4 and summary.count("FAILED ") == 8, done.stdout
    for first in re.findall(r"^KV304 .*, as with seed(\d): save\(\[[\d, ]+\]\); load\(copy, .+\)$", printed, re.M):
        assert first in "013", "seed 2 has another finding"
    assert len(re.findall("^KV304 .*, as with seed", printed, re.M)) == 4
    assert (folder / "junit.xml").read_text().count("  where   ") >= 8, "other reports have all of it"


def test_a_seed_is_a_test_that_pytest_runs_again(tmp_path: Path) -> None:
    folder = project(tmp_path, POOL + SEEDED)
    first = run_pytest(folder, "-q", "--kvcheck")
    assert first.returncode == 1 and "9 passed" in first.stdout and "test_seeds[seed3-2]" in first.stdout, first.stdout
    assert sorted(order_of(folder)) == sorted(f"{size}:{seed}" for size in (1, 2) for seed in range(5))
    (folder / "fixed").touch()
    assert run_pytest(folder, "-q", "--kvcheck", "--lf").returncode == 0
    assert order_of(folder) == ["2:3"]


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["alone", "xdist"])
def test_the_record_is_one_that_report_and_gate_read(
    tmp_path: Path, workers: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    plain = (
        "def test_plain_call():\n    pool = Forgets()\n"
        "    check_round_trip(pool, save=pool.save, load=pool.load, slots=31, seed=7)\n"
        "def test_not_about_kv():\n    pass\n"
    )
    folder = project(tmp_path, POOL + SEEDED + plain)
    done = run_pytest(folder, "-q", "--kvcheck", "--kvcheck-out", "runs", *workers)
    (path,) = (folder / "runs").glob("*/run.json")
    record = read_record(path)
    assert done.returncode == 1 and record.verdict is Verdict.FAIL and record.complete and record.exit_code == 1
    rows = {row.id: row for row in record.scenarios}
    assert {name: (row.verdict.value, row.schedules) for name, row in rows.items()} == {
        "own-code/test_it.py::test_seeds[1]": ("pass", 5),
        "own-code/test_it.py::test_seeds[2]": ("fail", 5),
        "own-code/test_it.py::test_plain_call": ("fail", 1),
    }
    assert [*rows][-1].endswith("test_plain_call"), "the order is that of the file, whoever ended first"
    replays = {each.replay for each in record.findings}
    assert "pytest --kvcheck 'test_it.py::test_seeds[seed3-2]'" in replays
    assert {each.code for each in record.findings} == {"KV304", "KV102"}
    assert "-q --kvcheck --kvcheck-out runs" in record.repro and record.repro.startswith("pytest ")
    assert str(path.relative_to(folder)) in done.stdout
    for command, ended in {"replay": 2, "shrink": 2, "show": 0}.items():
        assert run([command, f"{path}#1"]) == ended
        printed = capsys.readouterr()
        assert "pytest --kvcheck 'test_it.py::test_seeds[seed3-2]'" in printed.out + printed.err
    assert run(["gate", str(path)]) == 1 and "KV304 own-code/test_it.py::test_seeds[2]" in capsys.readouterr().out
    assert run(["report", str(path), "-o", f"html={tmp_path / 'page.html'}", "-o", f"csv={tmp_path / 'csv'}"]) == 0
    assert "own-code/test_it.py::test_seeds[2]" in (tmp_path / "page.html").read_text()


def test_a_green_record_passes_the_gate_and_one_without_a_verdict_does_not(tmp_path: Path) -> None:
    folder = project(tmp_path, POOL + SEEDED)
    (folder / "fixed").touch()
    assert run_pytest(folder, "-q", "--kvcheck", "--kvcheck-out", "green").returncode == 0
    (green,) = (folder / "green").glob("*/run.json")
    assert run(["gate", str(green)]) == 0
    assert read_record(green).evidence.words_verified["k_scale"] > 0
    project(tmp_path, POOL + SEEDED + "def test_broken(kvcheck_pool):\n    1 / 0\n")
    assert run_pytest(folder, "-q", "--kvcheck", "--kvcheck-out", "unknown").returncode == 1
    (unknown,) = (folder / "unknown").glob("*/run.json")
    record = read_record(unknown)
    assert record.verdict is Verdict.UNKNOWN and run(["gate", str(unknown)]) == 4
    assert "ZeroDivisionError" in json.dumps(json.loads(unknown.read_text())["scenarios"])
    assert run(["replay", str(green)]) == 2


@pytest.mark.parametrize(
    ("body", "arguments", "told"),
    [
        ("def test_a(): pass\n", ("--kvcheck-out", "runs"), "add --kvcheck"),
        ("import pytest\n@pytest.mark.kvcheck_schedules\ndef test_a(): pass\n", ("--kvcheck",), "with N of 1 or more"),
        ("def test_a(): pass\n", ("--kvcheck", "--kvcheck-out", "test_it.py"), "choose one with --kvcheck-out DIR"),
        ("def test_a(): pass\n", ("--kvcheck", "--kvcheck-seed", "9" * 23), "--kvcheck-seed: expected a "),
        ("def test_a(): pass\n", ("--kvcheck", "--kvcheck-seed", "many"), "--kvcheck-seed: expected a "),
    ],
)
def test_wrong_use_is_said_in_a_line(tmp_path: Path, body: str, arguments: tuple[str, ...], told: str) -> None:
    done = run_pytest(project(tmp_path, body), "-q", *arguments)
    assert done.returncode in (2, 4) and told in done.stdout + done.stderr
    assert not re.search("Traceback|INTERNALERROR", done.stdout + done.stderr)


NEGATIVE = """
@pytest.mark.kvcheck_schedules(2)
@pytest.mark.parametrize("size", [3, -3])
def test_sizes(kvcheck_pool, size):
    kvcheck_pool.round_trip((pool := Pool()), save=pool.save, load=pool.load, slots=31)
"""
EXPECTED = """
@pytest.mark.xfail(strict=True)
def test_xfail(kvcheck_pool):
    kvcheck_pool.round_trip((pool := Forgets()), save=pool.save, load=pool.load, slots=31)
def test_raises(kvcheck_pool):
    with pytest.raises(AssertionError):
        kvcheck_pool.round_trip((pool := Forgets()), save=pool.save, load=pool.load, slots=31)
"""


def test_seeds_and_parameters_below_zero_are_seeds_and_parameters(tmp_path: Path) -> None:
    done = run_pytest(project(tmp_path, POOL + NEGATIVE), "-q", "--kvcheck", "--kvcheck-seed", "-3")
    assert done.returncode == 0 and "kvcheck: 2 tests, 4 schedules" in done.stdout, done.stdout


def test_a_finding_that_is_expected_is_in_the_record_unless_the_test_catches_it(tmp_path: Path) -> None:
    folder = project(tmp_path, POOL + EXPECTED)
    done = run_pytest(folder, "-q", "--kvcheck", "--kvcheck-out", "runs")
    assert done.returncode == 0 and "1 passed, 1 xfailed" in done.stdout, done.stdout
    (path,) = (folder / "runs").glob("*/run.json")
    verdicts = {row.shape.partition("::")[2]: row.verdict.value for row in read_record(path).scenarios}
    assert verdicts == {"test_xfail": "fail", "test_raises": "pass"}


STAGED = """
class Staged(Pool):
    def __init__(self):
        super().__init__()
        self.staging, self.stream = torch.zeros(8, 4), torch.cuda.Stream()
    def save(self, ids):
        with torch.cuda.stream(self.stream):
            self.staging[:len(ids)].copy_(self.k[ids])
        return self.staging[:len(ids)].clone(), self.k_scale[ids]

def test_staged(kvcheck_streams, kvcheck_pool):
    pool = Staged()
    kvcheck_pool.round_trip(pool, save=pool.save, load=pool.load, slots=31, exclude=("staging",))
"""


def test_a_row_whose_findings_have_a_condition_fails_and_has_it_as_its_reason(tmp_path: Path) -> None:
    folder = project(tmp_path, POOL + STAGED)
    assert run_pytest(folder, "-q", "--kvcheck", "--kvcheck-out", "runs").returncode == 1
    (path,) = (folder / "runs").glob("*/run.json")
    (row,) = read_record(path).scenarios
    assert row.verdict is Verdict.FAIL and row.reason is not None
    assert row.reason.startswith("only if staging is memory of the device")
