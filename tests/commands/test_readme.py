"""README.md: its tables are what the published records say, its sample is what is printed, its links lead somewhere.

Invariants:
- A name in backticks of a table's row is a probe or a subject of one; the row has the worst verdict of its cells.
"""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from kvcheck.commands.main import COMMANDS, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
RECORDS = ROOT / "reports" / "published" / "engines" / "releases.csv"
MOST_LINES = 150
MOST_BYTES = 150_000


def tables(text: str) -> dict[str, list[list[str]]]:
    """Rows of each table, its head first, by the word at the top left."""
    found = {}
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines()]
        found[head[0]] = [head, *rows]
    return found


def cells_of(engine: str) -> list[dict[str, str]]:
    """The records' cells of an engine, all releases."""
    with RECORDS.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if row["kind"] == "cell" and row["engine"] == engine]


def worst(verdicts: list[tuple[str, str]]) -> str:
    """The word for cells of (verdict, codes)."""
    assert verdicts, "no such cell in the records"
    kinds = {verdict for verdict, _ in verdicts}
    if "fail" in kinds:
        return "FAIL"
    if "unknown" in kinds:
        return "?"
    return "latent" if any("conditional" in codes for _, codes in verdicts) else "pass"


def expected_rows(rows: list[list[str]], engine: str) -> list[list[str]]:
    """The rows of a table as the records have them."""
    cells = cells_of(engine)
    head, *named = rows
    made = [head]
    for row in named:
        names = re.findall(r"`([\w.-]+)`", row[0])
        words = []
        for release in head[1:]:
            here = [each for each in cells if each["version"] == release]
            words.append(
                worst(
                    [
                        (each["verdict"], each["codes"])
                        for name in names
                        for each in here
                        if each["cell"].split("/")[1] == name or each["cell"].split("/")[1].startswith(f"{name}.")
                    ]
                )
            )
        made.append([row[0], *words])
    return made


@pytest.mark.parametrize("engine", ["SGLang", "vLLM"])
def test_the_table_of_releases_is_what_the_records_say(engine: str) -> None:
    rows = tables(README)[engine]
    assert rows == expected_rows(rows, engine.lower())
    assert set(rows[0][1:]) == {row["version"] for row in cells_of(engine.lower())}


def test_a_table_that_differs_is_seen() -> None:
    rows = tables("| SGLang | 0.5.9 | 0.5.23 |\n|---|---|---|\n| x (`retract.nsa`) | pass | pass |\n")["SGLang"]
    assert expected_rows(rows, "sglang")[1] == ["x (`retract.nsa`)", "FAIL", "pass"]
    assert worst([("pass", "conditional KV301"), ("pass", "")]) == "latent"
    assert worst([("pass", ""), ("unknown", "")]) == "?"


def test_lmcache_passes_as_it_says() -> None:
    verdicts = {row["verdict"] for row in cells_of("lmcache") if row["version"] == "0.5.6"}
    assert "LMCache 0.5.6 passes." in README and verdicts == {"pass"}


def test_it_is_short_names_the_bugs_first_and_its_links_and_pictures_exist() -> None:
    lines = README.splitlines()
    assert len(lines) <= MOST_LINES and "(docs/bugs.md)" in lines[2]
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links {target}"
    script = (ROOT / "docs" / "images" / "make_images.sh").read_text(encoding="utf-8")
    shown = README + "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for picture in (ROOT / "docs" / "images").glob("*.png"):
        assert picture.stat().st_size < MOST_BYTES and f"images/{picture.name})" in shown
        named = re.sub(r"^bug-[a-e]$", "bug-$letter", picture.stem)
        assert re.search(rf"shot .*\b{re.escape(named)}\b", script), f"make_images.sh makes no {picture.name}"


def test_every_command_has_its_row() -> None:
    listed = {re.match(r"`kvcheck ([\w-]+)", row[0])[1] for row in tables(README)["command"][1:]}  # type: ignore[index]
    assert listed == set(COMMANDS)


@pytest.mark.schedules
def test_the_first_red_prints_the_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (typed,) = re.findall(r"^kvcheck (stress --mutant \S+ --seed 1)$", README, re.MULTILINE)
    assert run([*typed.split(), "--no-reports", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out.splitlines()
    (sample,) = re.findall(r"^```\n( FAIL .*?)^```", README, re.MULTILINE | re.DOTALL)
    assert len(sample.splitlines()) == 11
    for line in sample.splitlines():
        whole = line.removesuffix("...").rstrip()
        assert any(each.startswith(whole) if line.endswith("...") else each == whole for each in printed), line
