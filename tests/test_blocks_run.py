"""Blocks of the documents that are run as they are printed, or read by what reads such a file."""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from report.test_comparison import NEW, OLD
from rigs.blocks import PROJECT, block_of, kvcheck_words
from rigs.gate import vllm_run

from kvcheck.commands import baseline
from kvcheck.commands.main import command_named, run
from kvcheck.core.base.record import ScenarioResult, Verdict, read_record
from kvcheck.core.model import FAMILIES
from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers, walk_prompt
from kvcheck.core.model.family import fit_digits
from kvcheck.core.model.parameters import Parameters
from kvcheck.core.report.gate.baseline_file import read_baseline
from kvcheck.core.report.gate.budgets import read_budgets
from kvcheck.core.run.store import write_run
from tools.mutation.handwritten import read_hand_edits

SETTINGS = """[tool.kvcheck.stress]
shape = ["llama-3-tiny"]
schedules = 3
seed = 1
jobs = 1
max-time = 100
[tool.kvcheck.bench]
rounds = 8
max-time = 10
reports = false
[tool.kvcheck.gate]
max-time = 5
"""
"""Smaller than the defaults, for the block that runs everything: what is typed is as the page has it."""
MAKES_ITS_RUNS = "kvcheck stress --out runs"
MUTANT = "move-changes-indices"
TODAY = datetime.date(2026, 11, 24)
RUN_ID = "20260102-030405-0c4e91d7"
PLACES = {
    f"reports/runs/{RUN_ID}": "red",
    "RUN": "red",
    "MAIN": "newer",
    "kept/BEFORE": "green",
    "kept/AFTER": "red",
    "kept/RUN": "red",
    "kept/NEWER": "newer",
}


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Records: a red run with stories, under the id that the pages use, a green one, and a red one with another code.

    The code that was judged is broken on purpose. Here it stands for code of the reader's: no record names a mutant.
    """
    out = tmp_path_factory.mktemp("runs")
    plan = ["stress", "hicache", "--shape", "llama-3-tiny", "--seed", "1", "--schedules", "3", "--jobs", "1"]
    found = {}
    for name, more, run_id in (("red", ["--mutant", MUTANT], RUN_ID), ("green", [], RUN_ID.replace("2026", "2025"))):
        with contextlib.redirect_stdout(io.StringIO()):
            assert run([*plan, *more, "--no-reports", "--out", str(out / name)]) == (name == "red")
        (path,) = (out / name).glob("*/run.json")
        record = json.loads(path.read_text(encoding="utf-8").replace(path.parent.name, run_id))
        record["argv"] = [word for word in record["argv"] if word not in more]
        record["plan"]["cells"] = [each.replace(f"mutant={MUTANT},", "") for each in record["plan"]["cells"]]
        found[name] = json.dumps(record)
    first = json.loads(found["red"])["findings"][0]["code"]
    found["newer"] = found["red"].replace(f'"{first}"', '"KV104"').replace(RUN_ID, RUN_ID.replace("2026", "2027"))
    return found


@pytest.fixture
def desk(tmp_path: Path, records: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: the runs and files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(baseline, "_today", lambda: TODAY)
    monkeypatch.setattr("kvcheck.commands.gate.datetime", _Calendar)
    (tmp_path / "reports").mkdir()
    for name in ("baselines", "published"):
        (tmp_path / "reports" / name).symlink_to(PROJECT / "reports" / name)
    (tmp_path / "budgets.toml").write_text(block_of("docs/gate.md", "[[budget]]").text)
    (tmp_path / "ids.json").write_text(json.dumps(walk_of_the_page()[1]))
    for place, name in PLACES.items():
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(records[name])
    return tmp_path


class _Calendar(datetime.datetime):
    """A day on which what the pages accept has not expired."""

    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Calendar:
        """That day."""
        return cls(TODAY.year, TODAY.month, TODAY.day, tzinfo=tz)


def stored_for(document: str, start: str, desk: Path) -> None:
    """`runs/RUN` of a page: of docs/releases.md, runs of two releases of SGLang; for the gate, of the newest vLLM,
    whose finding the baseline knows."""
    if document != "docs/releases.md":
        (desk / "kept").rename(desk / "runs")
        return
    for name, record in (("RUN", vllm_run() if start.startswith("kvcheck gate") else NEW), ("RUN...", OLD)):
        (desk / "runs" / name).mkdir(parents=True)
        write_run(record, desk / "runs" / name)


PRICED = frozenset({0, 3, 4})
"""Exit codes of a gate over prices, which depend on the machine. A finding or an error is none of them."""
RUN_HERE: dict[tuple[str, str], tuple[int | frozenset[int], ...]] = {
    ("HACKING.md", ".venv/bin/python -m pytest"): (0,),
    ("HACKING.md", ".venv/bin/python -m pdb"): (1,),
    ("docs/releases.md", "kvcheck report runs/RUN"): (0,),
    ("docs/releases.md", "kvcheck gate runs/RUN"): (0,),
    ("docs/first-red.md", "kvcheck stress --mutant"): (1, 0, 0),
    ("docs/first-red.md", "kvcheck replay"): (1, 0),
    ("docs/five-bugs.md", "kvcheck show"): (0, 0),
    ("docs/gate.md", "kvcheck gate RUN"): (1, 0, 1),
    ("docs/gate.md", "kvcheck stress --out runs"): (0, 0, PRICED),
    ("docs/gate.md", "kvcheck baseline save"): (0, 0, 0, 0),
    ("docs/gate.md", "kvcheck compare"): (1,),
    ("docs/threads.md", "kvcheck stress"): (0, 1, 1),
    ("docs/live.md", "kvcheck model make tiny"): (0,) * 7,
    ("docs/reading-a-report.md", "kvcheck show"): (0, 0, 0),
    ("docs/schedules.md", "kvcheck shrink"): (1,),
    ("docs/schedules.md", "kvcheck stress retract-resume --decoder"): (0,),
    ("docs/schedules.md", "kvcheck stress retract-resume --shape llama-3-micro"): (0,),
    ("reports/published/README.md", "kvcheck show"): (0, 0, 0),
}
"""Exit codes of the kvcheck lines of a block, which is named by its document and its beginning."""


@pytest.mark.schedules
@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:The test results are likely unreliable")  # a busy machine has a price too
@pytest.mark.parametrize(("document", "start"), RUN_HERE)
def test_a_block_ends_as_its_row_says(document: str, start: str, desk: Path) -> None:
    if start == MAKES_ITS_RUNS:
        (desk / "pyproject.toml").write_text(SETTINGS)
    else:
        stored_for(document, start, desk)
    seen = []
    for line in block_of(document, start).commands:
        words = kvcheck_words(line)
        if words is None:  # of another program: test_documents.py knows paths of tests and targets of make
            continue
        spread = [str(each) for word in words for each in (sorted(Path().glob(word)) if "*" in word else [word])]
        seen.append(run(spread))
    for code, expected in zip(seen, RUN_HERE[document, start], strict=True):
        assert code in expected if isinstance(expected, frozenset) else code == expected, seen


def walk_of_the_page() -> tuple[Alphabet, list[int], list[int]]:
    """What docs/live.md asks of the model that it makes, and what it says is answered, in token ids."""
    block = block_of("docs/live.md", "<begin>")
    asks, _, answered = block.text.partition("->")
    begin, guard, *places, again, node = asks.split()
    ((layers, hops),) = re.findall(r"\((\d+) layers, (\d+) hops\)", block.text)
    digits, base = fit_digits(nodes=4096, kv_heads=4, room=FAMILIES.load("llama").room(64, 4096))
    alphabet = Alphabet(
        Parameters(
            family="llama",
            layers=int(layers),
            kv_heads=4,
            group=1,
            head_dim=64,
            length=4096,
            dtype="bf16",
            nodes=4096,
            digits=digits,
            base=base,
            distance=256,
        )
    )
    assert (begin, guard, again) == ("<begin>", "<guard>", places[0]) and alphabet.parameters.hops == int(hops)
    walk = [int(place.removeprefix("place")) for place in places]
    request = walk_prompt(alphabet, walk, walk.index(int(node.removeprefix("node"))))
    return alphabet, [*request], [alphabet.node(int(each)) for each in re.findall(r"node(\d+)", answered)]


def test_the_walk_of_the_page_has_the_answer_of_the_model() -> None:
    alphabet, request, expected = walk_of_the_page()
    assert len(expected) == 3 and [*answers(alphabet, request, 3)] == expected


def test_the_budgets_of_the_page_are_read(tmp_path: Path) -> None:
    path = tmp_path / "budgets.toml"
    path.write_text(block_of("docs/gate.md", "[[budget]]").text)
    (budget,) = read_budgets(path)
    case, arm, plain, most = re.findall(r'= "?([\w.-]+)"?', path.read_text())[:4]
    assert (budget.case, budget.arm, budget.baseline, budget.max_ratio) == (case, arm, plain, float(most))


def test_the_baseline_of_the_page_is_read(tmp_path: Path) -> None:
    path = tmp_path / "known.toml"
    path.write_text(block_of("docs/gate.md", "[[finding]]").text)
    finding, unknown = read_baseline(path)
    assert (finding.kind.value, unknown.kind.value) == ("finding", "unknown")
    ours = {row.key for row in read_baseline(PROJECT / "reports/baselines/engines.toml")}
    assert finding.key in ours, "a row of the baseline in the tree"
    reason = "cannot drive: ValueError: MambaPoolHost only supports layout='page_first_direct', got 'page_first'"
    row = ScenarioResult(id=str(unknown.cell), shape="", verdict=Verdict.UNKNOWN, reason=reason)
    assert unknown.expects(OLD, row) and not unknown.expects(OLD, replace(row, reason="cannot drive"))


def test_the_bug_by_hand_of_the_page_can_be_put_in(tmp_path: Path) -> None:
    path = tmp_path / "bugs.json"
    path.write_text(block_of("tools/mutation/README.md", "[{").text)
    (bug,) = read_hand_edits(path)
    assert bug.expect == ("KV201",) and bug.diff.startswith("-")


def test_the_settings_of_the_page_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = block_of("docs/settings.md", "[tool.kvcheck.stress]").text
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for command, options in tomllib.loads(text)["tool"]["kvcheck"].items():
        known = {word for each in command_named(command.replace("bench-serve", "bench")).params for word in each.opts}
        assert {f"--{name}" for name in options} <= known
    assert run(["stress", "--help"]) == 0, capsys.readouterr().err
    text = text.replace("schedules", "shedules", 1)
    (tmp_path / "pyproject.toml").write_text(text)
    assert run(["stress", "retract-resume"]) == 2
    assert "pyproject.toml" in capsys.readouterr().err


@pytest.mark.schedules
def test_the_lines_that_read_records_run(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block_of("reports/README.md", "import json").text, "reports/README.md", "exec"), {})
    record = read_record(desk / "reports/runs" / RUN_ID / "run.json")
    words = capsys.readouterr().out.split()
    assert words[:3] == [RUN_ID, "fail", str(len(record.findings))]
