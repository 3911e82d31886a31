"""README.md: its tables agree with the published verdicts, its sample is what is printed, its links lead somewhere."""

from __future__ import annotations

import html
import re
import runpy
from pathlib import Path

import pytest

from kvcheck.commands.main import COMMANDS, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
VERDICTS = ROOT / "reports" / "published" / "engines" / "README.md"


def tables(text: str) -> dict[str, list[list[str]]]:
    """Rows of each table, its head first, by the word at the top left."""
    found = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found[head[0]] = [head, *rows]
    return found


def published(engine: str) -> dict[str, dict[str, str]]:
    """The published words of an engine: by cell, then by release."""
    head, *rows = tables(VERDICTS.read_text(encoding="utf-8"))[engine]
    return {row[0].strip("`").partition("/")[2]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}


def worst(words: list[str]) -> str:
    """The word for several cells."""
    assert words, "no such cell is published"
    kinds = [word.partition(" ")[0] for word in words]
    return next(kind for kind in ("FAIL", "?", "latent", "pass") if kind in kinds)


def expected_rows(rows: list[list[str]], engine: str) -> list[list[str]]:
    """The rows of a table as the published cells have them: a row names probes, and has the worst of their cells."""
    cells, (head, *named) = published(engine), rows
    made = [head]
    for row in named:
        names = re.findall(r"`([\w.-]+)`", row[0])
        ours = [cells[cell] for cell in cells for name in names if cell == name or cell.startswith(f"{name}.")]
        made.append([row[0], *(worst([each[release] for each in ours]) for release in head[1:])])
    return made


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_the_table_of_releases_has_the_worst_of_the_published_cells(engine: str) -> None:
    rows = tables(README)[engine]
    assert rows == expected_rows(rows, engine)
    assert rows[0][1:] == [*next(iter(published(engine).values()))]


def test_a_table_that_differs_is_seen() -> None:
    rows = tables("| SGLang | 0.5.9 | 0.5.23 |\n|---|---|---|\n| x (`retract.nsa`) | pass | pass |\n")["SGLang"]
    assert expected_rows(rows, "SGLang")[1] == ["x (`retract.nsa`)", "FAIL", "pass"]
    assert worst(["latent", "pass"]) == "latent" and worst(["pass", "?"]) == "?"


def test_lmcache_passes_as_it_says() -> None:
    assert "LMCache 0.5.6 passes." in README
    assert {cell["0.5.6"] for cell in published("LMCache").values()} == {"pass"}


def test_the_table_of_the_transfer_engine_has_the_published_counts() -> None:
    _, *rows = tables((VERDICTS.parent / "transfers/README.md").read_text(encoding="utf-8"))["release"]
    counts = {(row[0], row[1].strip("`")): f"{sum(map(int, row[3].split(', ')))} of {row[2]}" for row in rows}
    (_, *releases), *shown = tables(README)["Mooncake's transfer engine, over TCP"]
    for (_, *cells), settings in zip(shown, ("none", "MC_TCP_PROTO=1"), strict=True):
        assert [cell or None for cell in cells] == [
            counts[release, settings] if cell else None for release, cell in zip(releases, cells, strict=True)
        ]


def test_every_command_has_its_row() -> None:
    listed = {re.match(r"`kvcheck ([\w-]+)", row[0])[1] for row in tables(README)["command"][1:]}  # type: ignore[index]
    assert listed == {name.split()[0] for name in COMMANDS}


@pytest.mark.schedules
def test_the_first_red_prints_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (typed,) = re.findall(r"^kvcheck (stress --mutant \S+ --seed 1)$", README, re.MULTILINE)
    assert run([*typed.split(), "--no-reports", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    (sample,) = re.findall(r"^```\n( ✘ .*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(sample.splitlines()) == 6
    for line in sample.splitlines():
        whole = line.removesuffix("...").rstrip()
        assert any(each.startswith(whole) if line.endswith("...") else each == whole for each in printed), line


@pytest.mark.schedules
def test_the_picture_of_the_terminal_is_what_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers differ from run to run."""
    made = tmp_path / "terminal.svg"
    script = runpy.run_path(str(ROOT / "docs" / "make_screen.py"))
    monkeypatch.setitem(script["main"].__globals__, "PICTURE", made)
    script["main"]()
    drawn, kept = (
        " ".join(re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8")))
        for path in (made, ROOT / "docs" / "images" / "terminal.svg")
    )
    words = [sorted(re.findall(r"[^\W\d]+", html.unescape(text))) for text in (drawn, kept)]
    assert words[0] == words[1] and "KV" in words[0]
