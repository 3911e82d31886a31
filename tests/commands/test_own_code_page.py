"""docs/own-code.md and its example: the commands end as the page says, its outputs are those, its code is the code."""

from __future__ import annotations

import inspect
import re
import shlex
import shutil
from pathlib import Path

import pytest
from rigs.plugged import EXAMPLE, PROJECT, run_pytest

import kvcheck.testing
from kvcheck.commands.main import run
from kvcheck.commands.pytest_asks import FIXTURES, MARKER
from kvcheck.core.base.record import read_record

PAGE = (PROJECT / "docs" / "own-code.md").read_text(encoding="utf-8")
OUTPUT = re.compile(r"^<!-- output: (\S+) -->\n```\n(.*?)^```", re.MULTILINE | re.DOTALL)
BUGS = {"PoolWithoutScale": "KV304", "MetadataOfViews": "KV305", "StreamedPoolWithoutWait": "KV201"}
OWNERS = {
    "PoolWithoutScale": "request 3's bytes",
    "MetadataOfViews": "request 1",
    "StreamedPoolWithoutWait": "request 3's",
}


@pytest.mark.processes
def test_the_example_is_red_for_each_bug_and_green_without_as_the_page_shows(tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "own-pool", ignore=shutil.ignore_patterns("__pycache__", ".*", "runs"))
    folder = tmp_path / "own-pool"
    (line,) = re.findall(r"^pytest (--kvcheck .*)$", PAGE, re.MULTILINE)
    done = run_pytest(folder, *shlex.split(line))
    assert done.returncode == 1
    # A block of output belongs to the test that the comment above it names; each line of it was printed.
    blocks = re.split(r"^_+ (\S+) _+$", done.stdout, flags=re.MULTILINE)
    printed = dict(zip(blocks[1::2], blocks[2::2], strict=True))
    shown = dict(OUTPUT.findall(PAGE))
    assert len(shown) == len(BUGS), "an output for each bug"
    for name, text in shown.items():
        assert text.strip() and text == _finding(printed[name]), f"{name} prints\n{_finding(printed[name])}"
    (path,) = (folder / "runs").glob("*/run.json")
    record = read_record(path)
    verdicts = {row.shape.partition("[")[2].rstrip("]"): row.verdict.value for row in record.scenarios}
    assert {name for name, verdict in verdicts.items() if verdict == "fail"} == {*BUGS}
    assert {name for name, verdict in verdicts.items() if verdict == "pass"} == {"Pool", "Metadata", "StreamedPool"}
    for name, code in BUGS.items():
        causes = [each for each in record.findings if each.cause is None and f"[{name}]" in each.shape]
        assert {each.code for each in causes} == {code} and all(OWNERS[name] in each.message for each in causes)
    assert run(["report", str(path), "-o", f"html={tmp_path / 'report.html'}"]) == 0 and run(["gate", str(path)]) == 1


def _finding(printed: str) -> str:
    """The lines of a failure, without what pytest writes behind the last one."""
    lines = printed.strip("\n").splitlines()
    last = max(at for at, line in enumerate(lines) if line.startswith("  more"))
    return "\n".join(lines[: last + 1]) + "\n"


def test_the_page_shows_a_test_of_the_example() -> None:
    source = (EXAMPLE / "test_my_pool.py").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert code in source
    assert {name for name in BUGS if f'"{name}"' in source} == {*BUGS}


def test_the_page_names_what_there_is_and_all_of_it() -> None:
    spans = " ".join(re.findall(r"`([^`\n]+)`", PAGE))
    assert all(name in spans for name in (*kvcheck.testing.__all__, *FIXTURES, MARKER) if name != "Streams")
    for call in (kvcheck.testing.check_round_trip, kvcheck.testing.watch, kvcheck.testing.waits):
        (named,) = re.findall(rf"^\*\*`{call.__name__}\((.*?)\)`\*\*", PAGE, re.MULTILINE)
        parameters = inspect.signature(call).parameters
        assert {each.strip().partition("=")[0] for each in named.split(",")} <= {*parameters}


def test_the_promise_of_stability_is_kept() -> None:
    known = {
        "check_round_trip": "pool save load slots page_size ids into padding exclude include unused as_ids unit seed",
        "waits": "pool streams save load read layers slots page_size ids into padding exclude include unused as_ids "
        "unit seed",
        "watch": "value of name owner is_view",
        "streams": "device",
        "Judged": "words reads orderings not_tried findings",
    }
    for name, parameters in known.items():
        assert [*inspect.signature(getattr(kvcheck.testing, name)).parameters] == parameters.split(), name
    assert kvcheck.testing.__all__ == tuple(sorted(kvcheck.testing.__all__)) and {*known} < {*kvcheck.testing.__all__}
