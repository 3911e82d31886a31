"""Pages of the documentation are what their tables make of them: bugs, codes, releases."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import shlex
import timeit
from functools import reduce
from importlib import import_module
from pathlib import Path

import pytest

from kvcheck.commands.main import run
from kvcheck.core.base.codes import BUGS
from kvcheck.core.stress.targets.mutants import MUTANTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "bugs.md").read_text(encoding="utf-8")
SHOWN = (ROOT / "docs" / "five-bugs.md").read_text(encoding="utf-8")
SECTIONS = {part[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}
LETTERS = sorted(SECTIONS)
FUNCTION = re.compile(r"`(kvcheck/[\w/]+\.py):([\w.]+)`")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
DOCS = Path(__file__).parents[2] / "docs"


def source_of(path: str, name: str) -> list[str]:
    """The lines of a function, not indented. Raises AttributeError where it is not there."""
    module = import_module(path.removesuffix(".py").replace("/", "."))
    return [line.strip() for line in inspect.getsource(reduce(getattr, name.split("."), module)).splitlines()]


def is_part(shown: str, source: list[str]) -> bool:
    """The shown lines are lines of the source, in their order. `...` stands for lines left out, as docstrings are."""
    left = iter(source)
    return all(line.strip() in left for line in shown.splitlines() if line.strip() != "...")


def shown_code(section: str) -> list[tuple[str, str, str]]:
    """(path, function, code) of each block, which belongs to the function that is named last before it."""
    rows = []
    for block in BLOCK.finditer(section):
        path, name = FUNCTION.findall(section[: block.start()])[-1]
        rows.append((path, name, block[1]))
    return rows


def command(letter: str, kind: str) -> tuple[list[str], str]:
    """The words of a command of a section, and what the page says it gives."""
    (line,) = [each for each in SECTIONS[letter].splitlines() if re.search(rf"  # {kind}\b", each)]
    typed, _, told = line.partition("  # ")
    return shlex.split(typed), told


def test_the_page_has_a_section_for_each_bug() -> None:
    assert sorted(text[0] for text in BUGS.values()) == LETTERS


@pytest.mark.parametrize("letter", LETTERS)
def test_every_function_that_is_named_exists_and_the_code_shown_is_its_code(letter: str) -> None:
    for path, name in FUNCTION.findall(SECTIONS[letter]):
        assert source_of(path, name)
    assert shown_code(SECTIONS[letter])
    for path, name, code in shown_code(SECTIONS[letter]):
        assert is_part(code, source_of(path, name)), f"{path}:{name} is not\n{code}"


def test_code_that_differs_is_seen() -> None:
    source = ["def f(x):", "if x:", "return 1", "return 2"]
    assert is_part("if x:\n    return 1\n", source) and is_part("def f(x):\n    ...\n    return 2\n", source)
    assert not is_part("if x:\n    return 3\n", source), "a changed line"
    assert not is_part("return 2\n...\ndef f(x):\n", source), "another order"


@pytest.mark.parametrize("letter", LETTERS)
def test_its_mutants_and_scripts_exist(letter: str) -> None:
    (line,) = re.findall(r"^\*\*Mutants:\*\*(.*)$", SECTIONS[letter], re.MULTILINE)
    names = re.findall(r"`([\w-]+)`", line)
    assert names and {MUTANTS[name].bug for name in names} == {letter}
    assert ("findings/" in SECTIONS[letter]) != (letter == "d"), "no release has bug d"


@pytest.mark.usefixtures("as_found")
@pytest.mark.schedules
@pytest.mark.parametrize("letter", LETTERS)
def test_red_command_exits_1_with_the_code_that_the_page_names(
    letter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcheck.commands.stories.STORIES_S", 600.0)  # however busy the machine is
    words, told = command(letter, "red")
    (code,) = re.findall(r"red: exit 1, (KV\d+)", told)
    assert words[0] == "kvcheck" and run([*words[1:], "--no-reports", "--out", str(tmp_path)]) == 1
    (record,) = tmp_path.glob("*/run.json")
    findings = json.loads(record.read_text())["findings"]
    assert code in {each["code"] for each in findings}
    (section,) = re.findall(rf"^## ({letter}\. .*?)(?=^## |\Z)", SHOWN, re.MULTILINE | re.DOTALL)
    causes = list(dict.fromkeys(each["code"] for each in findings if each["cause"] is None))
    assert re.findall(r"KV\d+", section.partition("![")[0]) == causes and f"(images/bug-{letter}.png)" in section
    capsys.readouterr()
    trace = tmp_path / "trace.json"
    assert run(["show", "--out", str(tmp_path), "-o", f"perfetto={trace}"]) == 0
    assert " lanes " in capsys.readouterr().out and json.loads(trace.read_text())["traceEvents"]


@pytest.mark.schedules
@pytest.mark.parametrize("letter", LETTERS)
def test_green_command_is_the_red_one_without_its_mutant_and_exits_0(letter: str, tmp_path: Path) -> None:
    words, _ = command(letter, "green")
    red, _ = command(letter, "red")
    assert red[:-2] == words and red[-2] == "--mutant"
    assert run([*words[1:], "--no-reports", "--out", str(tmp_path)]) == 0


@pytest.mark.filterwarnings("ignore:The test results are likely unreliable")  # a busy machine has a price too
@pytest.mark.parametrize("letter", LETTERS)
def test_price_command_prints_a_price(letter: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, _ = command(letter, "price")
    if words[0] == "kvcheck":
        assert run([*words[1:], "--no-reports", "--out", str(tmp_path)]) == 0
    else:
        assert words[:3] == ["python", "-m", "timeit"] and timeit.main(["-n", "10", *words[3:]]) is None
    assert re.search(r"\d (µs|ms|[nmu]?sec)", capsys.readouterr().out)


def test_the_page_of_codes_is_made_from_the_table() -> None:
    made = runpy.run_path(str(DOCS / "make_codes.py"))["page"]()
    assert (DOCS / "codes.md").read_text(encoding="utf-8") == made, "run: python docs/make_codes.py"
