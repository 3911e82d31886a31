"""Tables of a campaign as CSV and Markdown: shares by file and operator, kills by oracle, and each survivor.

Invariants:
- A share is of the edits that ran and are faults: all but unreached, equivalent, legal and invalid ones. `share`
  counts kills; `not green` also hangs, crashes and missing evidence, with which a run does not pass either.
- Text from source cannot become markup, a link or a formula.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from statistics import median

from kvcheck.core.base.nouns import counted
from kvcheck.core.report.markdown import escaped, printable, table_line
from kvcheck.core.report.to_csv import csv_text
from kvcheck.core.run.store import write_text
from tools.mutation.results import JUDGED, NOT_GREEN, OUTCOMES, Campaign, Result

CSV_FILE = "edits.csv"
PAGE_FILE = "edits.md"
COLUMNS = tuple(each.name for each in fields(Result))
KILLED = ("killed",)
COUNTED = ("edits", *OUTCOMES, "share", "not green")


def write_tables(folder: Path, campaign: Campaign, results: Sequence[Result]) -> None:
    ordered = sorted(results, key=lambda each: (each.file, each.line_number, each.operator, each.id))
    write_text(folder / CSV_FILE, csv_text(COLUMNS, [_csv_row(each) for each in ordered]))
    write_text(folder / PAGE_FILE, page(campaign, ordered))


def page(campaign: Campaign, results: Sequence[Result]) -> str:
    lines = ["# Generated edits of the cache, judged by the default run", "", *_head(campaign, results)]
    lines += ["", "## By file", "", *_counts("file", results, lambda each: each.file)]
    lines += ["", "## By operator", "", *_counts("operator", results, lambda each: each.operator)]
    lines += ["", "## Kills by oracle", "", *_kills(results)]
    for outcome, title in (
        ("survived", "Survivors"),
        ("unknown", "Found by missing evidence alone"),
        ("unclear", "Findings that the code as it is has too"),
        ("hang", "Hangs"),
        ("crash", "Crashes"),
    ):
        rows = [each for each in results if each.outcome == outcome]
        if rows:
            lines += ["", f"## {title}", ""]
            for each in rows:
                lines += _survivor(each)
    lines += _places("Unreached", "Each is a situation that no surveyed schedule leads to.", results, "unreached")
    lines += _places("Legal", "Other correct ways to do it. A finding of one would be a false alarm.", results, "legal")
    lines += _places("Equivalent", "No run can tell these from the original.", results, "equivalent")
    return "\n".join(lines) + "\n"


def summary_lines(results: Sequence[Result]) -> list[str]:
    return ["".join(f"{text:>12}" for text in row) for row in (COUNTED, _row(results))]


def _head(campaign: Campaign, results: Sequence[Result]) -> list[str]:
    ran = [each for each in results if each.schedules]
    spent = [each.total_cpu_s for each in ran]
    killed = [each.cpu_s for each in ran if each.is_kill]
    lines = [
        f"Code {escaped(campaign.code)}, seed {campaign.seed}, at most {counted(campaign.schedules, 'schedule')} a "
        f"cell and {campaign.cpu_s:g} CPU seconds of schedules an edit.",
        "",
        table_line(("", *COUNTED)),
        "|" + " --- |" * (1 + len(COUNTED)),
        table_line(("all", *_row(results))),
        table_line(("in checks", *_row([each for each in results if each.is_guard]))),
        table_line(("elsewhere", *_row([each for each in results if not each.is_guard]))),
        "",
        *_with_legal(results),
        "Edits in checks change what is refused. Schedules make no illegal calls: tests of the classes do.",
        "",
    ]
    if spent:
        lines.append(
            f"CPU seconds an edit that ran: median {median(spent):.1f}, in total {sum(spent):,.0f}. "
            + (f"Of schedules until a kill: median {median(killed):.2f}." if killed else "")
        )
    return lines


def _with_legal(results: Sequence[Result]) -> list[str]:
    strict = share_of(
        [replace(each, outcome="survived") if each.outcome == "legal" else each for each in results], KILLED
    )
    if strict is None or not any(each.outcome == "legal" for each in results):
        return []
    return [f"Legal choices count neither way. Counted as survivors, the share of kills is {100 * strict:.1f} %.", ""]


def _counts(name: str, results: Sequence[Result], key: Callable[[Result], str]) -> list[str]:
    lines = [table_line((name, *COUNTED)), "|" + " --- |" * (1 + len(COUNTED))]
    for value in sorted({key(each) for each in results}):
        lines.append(table_line((value, *_row([each for each in results if key(each) == value]))))
    return lines


def share_of(results: Sequence[Result], outcomes: Sequence[str]) -> float | None:
    judged = sum(each.outcome in JUDGED for each in results)
    return sum(each.outcome in outcomes for each in results) / judged if judged else None


def _row(results: Sequence[Result]) -> list[str]:
    count = Counter(each.outcome for each in results)
    shares = (share_of(results, KILLED), share_of(results, NOT_GREEN))
    return [
        str(len(results)),
        *(str(count[name]) for name in OUTCOMES),
        *("" if share is None else f"{100 * share:.1f} %" for share in shares),
    ]


def _kills(results: Sequence[Result]) -> list[str]:
    count = Counter((each.oracle, each.code) for each in results if each.is_kill)
    lines = [table_line(("oracle", "code", "kills")), "| --- | --- | --- |"]
    ordered = sorted(count.items(), key=lambda row: (-row[1], row[0]))
    return lines + [table_line((oracle, code, str(number))) for (oracle, code), number in ordered]


def _survivor(result: Result) -> list[str]:
    tried = ", ".join(f"{cell} {number}" for cell, number in result.cells.items())
    lines = [
        f"- {escaped(f'{result.id}  {result.file}:{result.line_number}  {result.function}  {result.operator}')}",
        "",
        *(f"      {printable(line)}" for line in result.diff.splitlines()),
        "",
    ]
    why = [text for text in (result.message, result.note, result.line) if text]
    lines += [f"  {escaped(text)}" for text in why]
    lines += [f"  Left: {escaped(result.reason)}"] if result.reason else []
    ran = f"{counted(result.schedules, 'schedule')}, {result.cpu_s:.1f} CPU s: {tried}"
    return [*lines, f"  {escaped(ran)}", ""]


def _places(title: str, about: str, results: Sequence[Result], outcome: str) -> list[str]:
    places: dict[str, list[Result]] = {}
    for each in results:
        if each.outcome == outcome:
            places.setdefault(f"{each.file}:{each.line_number}", []).append(each)
    lines = ["", f"## {title}", "", about, ""] if places else []
    for place, edits in places.items():
        kinds = ", ".join(dict.fromkeys(each.operator for each in edits))
        reasons = "".join(f": {reason}" for reason in dict.fromkeys(each.reason for each in edits) if reason)
        lines.append(f"- {escaped(f'{place}  {edits[0].function}  ({kinds}){reasons}')}")
    return lines


def _csv_row(result: Result) -> list[object]:
    cells = "; ".join(f"{cell} {number}" for cell, number in result.cells.items())
    texts = {"kinds": "; ".join(result.kinds), "cells": cells, "expect": " ".join(result.expect)}
    return [value if value != "" else None for value in (asdict(result) | texts).values()]
