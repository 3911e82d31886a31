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
from kvcheck.core.report.wording import aligned

LINE = 110
"""Characters of a line of text."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """columns: happenings with their meanings. rows: states with their meanings, and their counts by column."""

    subject: str
    columns: dict[str, str]
    rows: tuple[tuple[str, str, tuple[int | None, ...]], ...]


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
        happenings, states = {each.happening for each in of_subject}, {each.state for each in of_subject}
        columns = {name: meaning for name, meaning in HAPPENINGS.items() if name in happenings}
        rows = []
        for state in STATES:
            if state.subject == subject and state.name in states:
                cells = [Situation(subject, state.name, column) for column in columns]
                found = tuple(counts.get(each.key, 0) if each in legal else None for each in cells)
                rows.append((state.name, state.meaning, found))
        if rows:
            made.append(Matrix(subject, columns, tuple(rows)))
    return tuple(made)


def reached_text(scenarios: Sequence[str], counts: Mapping[str, int]) -> str:
    legal = {each.key for name in scenarios for each in situations_of(name)}
    return f"{sum(bool(counts.get(key)) for key in legal)} of {len(legal)}"


def matrix_lines(record: RunRecord) -> list[str]:
    """One line for a run with findings: it may have been cut, so that unreached situations mean little."""
    scenarios, counts = scenarios_of(record), record.evidence.situations
    if not scenarios:
        return []
    reached = f" situations  {reached_text(scenarios, counts)} reached"
    if record.findings:
        return [f"{reached} (the page has the matrix)", ""]
    lines = [f"{reached} (what each is: kvcheck list situations)"]
    for matrix in matrices(scenarios, counts):
        rows = [(matrix.subject, *matrix.columns)]
        rows += [(state, *("" if each is None else f"{each:,}" for each in found)) for state, _, found in matrix.rows]
        lines += ["", *(f"   {line}" for line in aligned(rows, is_right=True))]
    missing = "; ".join(_never(scenarios, counts))
    told = textwrap.wrap(f"never reached: {missing}", LINE, initial_indent="   ", subsequent_indent=" " * 18)
    return [*lines, *(["", *told] if missing else []), ""]


def _never(scenarios: Sequence[str], counts: Mapping[str, int]) -> list[str]:
    by_state: dict[str, list[str]] = {}
    for each in never_reached(scenarios, counts):
        by_state.setdefault(f"{each.subject} {each.state}", []).append(each.happening)
    return [f"{state} ({', '.join(names)})" for state, names in by_state.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class SituationView:
    """unknown: counts of situations that this version's table lacks."""

    reached: str
    matrices: tuple[Matrix, ...]
    never: list[str]
    unknown: dict[str, int]


def situation_view(record: RunRecord) -> SituationView | None:
    scenarios, counts = scenarios_of(record), record.evidence.situations
    if not scenarios:
        return None
    return SituationView(
        reached=reached_text(scenarios, counts),
        matrices=matrices(scenarios, counts),
        never=_never(scenarios, counts),
        unknown={key: count for key, count in counts.items() if key not in SITUATIONS},
    )
