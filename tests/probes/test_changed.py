"""`--changed`: lines of a change, the cells that run them, and stale rows of the map."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from fakes.engine import FAKES
from rigs.literal_record import FOREIGN

from kvcheck.commands.main import run
from kvcheck.core.base.errors import UnknownVerdict, UsageError
from kvcheck.core.base.identity import code_digest, file_digest
from kvcheck.core.base.record import Evidence
from kvcheck.core.probes.changed import Change, FileRun, LineMap, changed_files, code_lines, codes_of, load
from kvcheck.core.probes.frame.lines_run import as_ranges, from_ranges
from kvcheck.core.probes.frame.wire import Ask, Reply
from kvcheck.core.probes.runner import ProbeRunner
from kvcheck.core.run.plan import Plan, parse_line

pytestmark = pytest.mark.processes  # git
TEXT = "N = 1\n\n\ndef f(a):\n    if a:\n        a += 1\n    # why\n    return a\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "engine"
    folder.mkdir()
    (folder / "a.py").write_text(TEXT)
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    return folder


def test_lines_of_functions_are_told_from_others(package: Path) -> None:
    assert code_lines(codes_of(package / "a.py")) == ({5, 6, 8}, {1, 4})
    assert from_ranges(as_ranges({1, 2, 3, 7})) == {1, 2, 3, 7} and as_ranges({1, 2, 3, 7}) == "1-3,7"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (TEXT.replace("+= 1", "+= 2"), {(6,)}),
        (TEXT.replace("        a += 1\n", "        pass\n"), {(6,)}),
        (TEXT.replace("    if a:\n        a += 1\n", ""), {(4, 6)}),
        (TEXT.replace("# why", "# because"), {(6, 8)}),
    ],
    ids=["changed", "pass", "removed", "comment"],
)
def test_a_change_is_its_lines_or_those_around_it(text: str, parts: set[tuple[int, ...]], package: Path) -> None:
    (package / "a.py").write_text(text)
    for given in ("a.py", "engine/a.py", str(package / "a.py"), "HEAD", "HEAD.."):
        (found,) = changed_files(given, package)
        assert (found.name, found.parts, found.is_whole, found.functions) == ("a.py", parts, False, ("f",))


def test_whether_a_change_ran(package: Path) -> None:
    (package / "a.py").write_text(TEXT.replace("+= 1", "+= 2").replace("return a", "return a or 2"))
    change = Change(tuple(changed_files("a.py", package)))
    some = {"x/p.s": {"a.py": {5, 8}}, "x/p.t": {}}
    assert change.misses(some) and change.has_run(some) and "1 of 2 changed" in change.texts(some)[0]
    assert not change.has_run({"x/p.s": {"a.py": {5}}}) and not change.misses({"x/p.s": {"a.py": {6, 8}}})


def test_a_cell_that_fails_after_its_first_schedule_has_its_lines() -> None:
    """A change had run in one cell only, and the cell that failed by it in its seventh schedule was not named."""
    child = Mock()
    asked: list[Ask] = []

    def ask(given: Ask) -> Reply:
        asked.append(given)
        lines = dict.fromkeys(given.traced, "6" if given.schedule else "5")
        return Reply(findings=(FOREIGN,) * given.schedule, evidence=Evidence(schedules=1), lines=lines)

    child.ask = ask
    runner = ProbeRunner("sglang", traced=("a.py",), _child=child)
    plan = Plan(scenario="hicache", probe="host-copy.nsa-direct", target="sglang", seed=1)
    assert not runner.run(plan).findings and runner.run(replace(plan, schedule=1)).findings
    assert runner.ran == {plan.cell: {"a.py": {5, 6}}}
    assert [(each.schedule, each.traced) for each in asked] == [(0, ("a.py",)), (1, ()), (1, ("a.py",))]


def test_what_is_no_file_and_no_range_is_refused(package: Path) -> None:
    (package / "a.txt").touch()
    for given in ("b.py", "a.txt", "no-such-branch..HEAD", "-O/x", "HEAD..HEAD~1", "x" * 300):
        with pytest.raises(UsageError):
            changed_files(given, package)
    with pytest.raises(UnknownVerdict):
        changed_files("HEAD", package)


def test_a_changed_file_makes_its_own_rows_stale(package: Path, tmp_path: Path) -> None:
    row = {"a.py": FileRun(file_digest(package / "a.py"), "5-6,8")}
    plans = [Plan(scenario="x", probe=probe) for probe in ("p.s", "p.t", "p.new")]
    made = LineMap(kvcheck=code_digest(), target="sglang", cells={plans[0].cell: row, plans[1].cell: {}})
    made.save(tmp_path / "map.json")
    kept = load(tmp_path / "map.json", "sglang")
    assert kept == made and kept.stale(package, plans, ()) == plans[2:]
    assert [kept.runs(plan.cell, ["a.py"]) for plan in plans] == [3, 0, 1]
    (package / "a.py").write_text("")
    assert kept.stale(package, plans, ()) == [plans[0], plans[2]] and kept.stale(package, plans, ["a.py"]) == plans[2:]
    (tmp_path / "map.json").write_text("{")
    assert load(tmp_path / "map.json", "sglang").cells == {}


@pytest.mark.processes(starts=True)
def test_only_cells_that_run_the_file_are_run(
    tmp_path: Path, fake: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    package = next(Path(each) for each in FAKES if Path(each).name == "vllm") / "vllm"
    monkeypatch.chdir(fake.parent)
    base = ["probe", f"vllm:{fake.name}", "--seed", "1", "--out", str(tmp_path / "runs"), "--no-reports"]
    file = str(package / "v1/kv_offload/cpu/manager.py")
    assert run([*base, "--format", "json", "--changed", file]) == 0
    told = capsys.readouterr()
    record = json.loads(told.out)
    assert {row["id"] for row in record["scenarios"]} == {"offload/cpu-offload.lru", "offload/cpu-offload.arc"}
    assert any(line.startswith("changed: no changes of v1/") for line in record["warnings"]) and "measuring" in told.err
    assert "folder" not in record["environment"]["engine"]
    assert {parse_line(line).target for line in record["plan"]["cells"]} == {f"vllm:{fake}"}  # for any folder
    assert run([*base, "--probe", "blocks", "--changed", file]) == 4
    told = capsys.readouterr()
    assert "measuring" not in told.err and "no probe of vllm" in told.err and not told.out
    assert run(["explain", "cpu-offload"]) == 0
    assert "v1/kv_offload/cpu/manager.py" in capsys.readouterr().out
