"""The matrix of situations: for each subject its states by happenings, with their counts in this run.

Invariants:
- A count is 0 only if one of the run's scenarios can reach the situation; otherwise it is None.
- A situation of the record that the table lacks has a line of its own.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.record import RunRecord
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.base.situations import HAPPENINGS, SITUATIONS, STATES, Situation, never_reached, situations_of

LINE = 110
"""Characters of a line of text."""
SHADES = 4
"""Steps of colour on the page: 1 to 9, 10 to 99, and so on."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """A state and its counts by column."""

    state: str
    meaning: str
    counts: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    subject: str
    columns: tuple[str, ...]
    rows: tuple[MatrixRow, ...]


def scenarios_of(record: RunRecord) -> tuple[str, ...]:
    """Return scenarios with situations; none for records of older versions, servers and installed engines."""
    if not record.evidence.situations or server_of(record) is not None or "engine" in record.environment:
        return ()
    names = dict.fromkeys(row.id.partition("/")[0] for row in record.scenarios)
    return tuple(name for name in names if situations_of(name))


def matrices(scenarios: Sequence[str], counts: Mapping[str, int]) -> tuple[Matrix, ...]:
    legal = {each for name in scenarios for each in situations_of(name)}
    made = []
    for subject in dict.fromkeys(state.subject for state in STATES):
        of_subject = {each for each in legal if each.subject == subject}
        columns = tuple(name for name in HAPPENINGS if any(each.happening == name for each in of_subject))
        rows = tuple(
            MatrixRow(state.name, state.meaning, _counts(subject, state.name, columns, legal, counts))
            for state in STATES
            if state.subject == subject and any(each.state == state.name for each in of_subject)
        )
        if rows:
            made.append(Matrix(subject, columns, rows))
    return tuple(made)


def _counts(
    subject: str, state: str, columns: Sequence[str], legal: set[Situation], counts: Mapping[str, int]
) -> tuple[int | None, ...]:
    situations = (Situation(subject, state, column) for column in columns)
    return tuple(counts.get(each.key, 0) if each in legal else None for each in situations)


def reached_text(scenarios: Sequence[str], counts: Mapping[str, int]) -> str:
    """Return reached of reachable situations, such as "37 of 52", for these scenarios."""
    legal = {each.key for name in scenarios for each in situations_of(name)}
    return f"{sum(bool(counts.get(key)) for key in legal)} of {len(legal)}"


def matrix_lines(record: RunRecord) -> list[str]:
    """Return the matrix as text, with the situations never reached.

    One line for a run with findings: it may have been cut, so that unreached situations mean little.
    """
    scenarios, counts = scenarios_of(record), record.evidence.situations
    if not scenarios:
        return []
    reached = f" situations  {reached_text(scenarios, counts)} reached"
    if record.findings:
        return [f"{reached} (the page has the matrix)", ""]
    lines = [f"{reached} (what each is: kvcheck list situations)"]
    for matrix in matrices(scenarios, counts):
        cells = [["" if each is None else f"{each:,}" for each in row.counts] for row in matrix.rows]
        widths = [max(len(name), *(len(row[at]) for row in cells)) for at, name in enumerate(matrix.columns)]
        first = max(len(matrix.subject), *(len(row.state) for row in matrix.rows))
        head = "  ".join(name.rjust(width) for name, width in zip(matrix.columns, widths, strict=True))
        lines += ["", f"   {matrix.subject:<{first}}  {head}"]
        lines += [
            f"   {row.state:<{first}}  {'  '.join(map(str.rjust, each, widths))}".rstrip()
            for row, each in zip(matrix.rows, cells, strict=True)
        ]
    missing = "; ".join(_never(scenarios, counts))
    told = textwrap.wrap(f"never reached: {missing}", LINE, initial_indent="   ", subsequent_indent=" " * 18)
    return [*lines, *(["", *told] if missing else []), ""]


def _never(scenarios: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for each in never_reached(scenarios, counts):
        by_state.setdefault(f"{each.subject} {each.state}", []).append(each.happening)
    return [f"{state} ({', '.join(names)})" for state, names in by_state.items()]


def matrix_section(record: RunRecord) -> dict[str, object] | None:
    scenarios, counts = scenarios_of(record), record.evidence.situations
    if not scenarios:
        return None
    return {
        "reached": reached_text(scenarios, counts),
        "tables": [
            {
                "subject": matrix.subject,
                "columns": [{"name": name, "title": HAPPENINGS[name]} for name in matrix.columns],
                "rows": [
                    {
                        "state": row.state,
                        "title": f"a {matrix.subject} {row.meaning}",
                        "cells": [_cell(count) for count in row.counts],
                    }
                    for row in matrix.rows
                ],
            }
            for matrix in matrices(scenarios, counts)
        ],
        "never": _never(scenarios, counts),
        "unknown": [f"{key}: {count:,}" for key, count in counts.items() if key not in SITUATIONS],
    }


def _cell(count: int | None) -> dict[str, str]:
    if count is None:
        return {"text": "", "kind": "illegal"}
    return {"text": f"{count:,}", "kind": f"s{min(SHADES, len(str(count)))}" if count else "s0"}
