"""The published tables of the transfer engine are those of the published runs, and the README shows them.

Invariants:
- Each statement of the pages about releases is compared with the records.
"""

from __future__ import annotations

from pathlib import Path

from engines.transfer_table import markdown, records, table

from kvcheck.core.base.record import Verdict

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "reports" / "published" / "engines" / "transfers"
RUNS = records(PUBLISHED / "runs")
FULL = records(PUBLISHED / "full")
OLD = {"0.3.7.post2", "0.3.9", "0.3.10.post2", "0.3.11.post1"}
"""Releases whose receivers acknowledge nothing."""
TOO_FEW = "a pass takes 12"
SIZES = {"64 B to 1 KiB", "1 to 16 KiB", "16 to 256 KiB", "256 KiB to 2 MiB", "2 to 8 MiB"}


def version(run: object) -> str:
    return str(run.environment["engine"]["version"])  # type: ignore[attr-defined]


def test_the_tables_are_those_of_the_runs() -> None:
    assert (PUBLISHED / "transfers.csv").read_text(encoding="utf-8") == table(RUNS)
    rows = set(markdown(RUNS))
    page = (PUBLISHED / "README.md").read_text(encoding="utf-8").splitlines()
    assert rows <= set(page)


def test_the_readme_shows_the_same_counts() -> None:
    counts = {}
    for line in markdown(RUNS):
        release, settings, writes, wrong, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        if release[0].isdecimal():
            total = sum(int(count) for count in wrong.split(", "))
            counts[release, settings.strip("`")] = f"{total} of {writes}"
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("| Mooncake's transfer engine"))
    releases, _, usual, by_proto = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines[at : at + 4])
    for shown, settings in ((usual, "none"), (by_proto, "MC_TCP_PROTO=1")):
        assert any(shown)
        assert all(cell == counts[release, settings] for release, cell in zip(releases, shown, strict=True) if cell)


def test_releases_are_red_and_without_findings_as_the_page_says() -> None:
    for run in RUNS:
        is_unacknowledged = version(run) in OLD
        is_unacknowledged |= "MC_TCP_PROTO" in dict(run.plan.get("engine_env", {}))  # type: ignore[call-overload]
        red = {cell.shape for cell in run.scenarios if cell.verdict is Verdict.FAIL}
        assert bool(red) is is_unacknowledged, (version(run), run.plan.get("engine_env"))
        others = [cell for cell in run.scenarios if cell.verdict is not Verdict.FAIL]
        assert all(TOO_FEW in (cell.reason or "") for cell in others), "UNKNOWN for no other reason"


def test_the_full_run_has_enough_writes_of_all_sizes_and_nothing_wrong() -> None:
    (run,) = FULL
    assert run.complete and run.verdict is Verdict.PASS
    assert all(finding.condition is not None for finding in run.findings)
    cells = [cell for cell in run.scenarios if cell.shape.startswith("landing.") and cell.shape != "landing.frozen"]
    assert len(cells) == 4
    assert all((cell.evidence.transfers or 0) >= 2_000 and set(cell.evidence.words_verified) == SIZES for cell in cells)
