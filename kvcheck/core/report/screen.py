"""The screen of a run: its grid of cells, the counts below it, and its causes, as plain lines of a terminal's width.

    retract-resume  ✔7 ✔5        a row is a scenario or a probe, a column a model family; an entry is a cell
    ✔ pass   ✘ fail   ? unknown   · open; the number is that of schedules run

Invariants:
- No line is longer than the width, except commands and paths, which are to be copied whole.
- Nothing is shown that the record lacks: the live screen is the same, of an incomplete record.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence

from kvcheck.core.base.nouns import counted, plural, some_of, span
from kvcheck.core.base.record import STOPPED, Finding, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import SERVE_CASES, is_requirement, server_of
from kvcheck.core.report.cards import COPIED, MOST_NAMED, Card, cards_of, cells_text, condition_text, facts_of
from kvcheck.core.report.prices import in_short, is_check, is_enough
from kvcheck.core.report.situation_matrix import situation_view
from kvcheck.core.report.view import ENDED, KILLED, LEAST_FILLED, CellView, cells_of, verdicts_text, work_counts
from kvcheck.core.report.wording import LABEL, aligned, hanging, labelled, why_text, wrapped

MARK = {Verdict.PASS: "✔", Verdict.UNKNOWN: "?", Verdict.FAIL: "✘"}
OPEN = "·"
"""The mark of a cell that has not run enough for a verdict."""
MOST_CAUSES = 3
MOST_REASONS = 4
MOST_NOTES = 8
NOTED = ("not tried", "changed")
"""Labels of notes, before a colon."""
Reviewed = Mapping[tuple[str, str], Sequence[Finding]]
HEADS = (40, 8, 0)
"""Longest heads of a grid's columns, in characters, widest form first. Only hyphens break."""
SIZE = re.compile(r"-(micro|tiny|small)$")


def grid_lines(record: RunRecord, width: int) -> list[str]:
    """Return the grid in the widest form that fits: columns with heads, or named entries in lines."""
    cells = cells_of(record)
    if not cells:
        return []
    placed: dict[str, dict[str, list[CellView]]] = {}
    for cell in cells:
        placed.setdefault(cell.line, {}).setdefault(SIZE.sub("", cell.column), []).append(cell)
    heads = [*dict.fromkeys(head for row in placed.values() for head in row)]
    is_engine = "engine" in record.environment  # its probes have variants of their own
    if not is_engine and sum(map(len, placed.values())) >= LEAST_FILLED * len(placed) * len(heads):
        for with_counts in (True, False):
            for longest in HEADS:
                lines = _table(placed, heads, with_counts=with_counts, longest=longest)
                if max(map(len, lines)) <= width:
                    return [*lines, *wrapped(_legend(record, with_counts), width)]
    return _named_entries(placed, width)


def _legend(record: RunRecord, with_counts: bool) -> str:
    floors = [row.coverage.floor for row in record.scenarios if row.coverage is not None]
    if not floors or server_of(record) is not None:
        return ""
    sizes = dict.fromkeys(found[1] for row in record.scenarios if (found := SIZE.search(row.shape)) is not None)
    parts = (
        " ✔ pass  ✘ fail  ? unknown  · open",
        f"number: schedules run (a pass takes {span(floors)})" if with_counts else "",
        f"shapes: {', then '.join(sizes)}" if len(sizes) > 1 else "",
    )
    return "   ".join(filter(None, parts))


def _entry(row: ScenarioResult, with_counts: bool) -> str:
    is_counted = with_counts and row.schedules and not (is_requirement(row) or row.id in SERVE_CASES)
    mark = OPEN if row.reason == STOPPED else MARK[row.verdict]
    return f"{mark}{row.schedules if is_counted else ''}"


def _table(
    placed: Mapping[str, Mapping[str, Sequence[CellView]]], heads: Sequence[str], *, with_counts: bool, longest: int
) -> list[str]:
    """Return a line for each row, below the heads, which break at hyphens if they are longer."""
    rows = [[name, *(_entries(row.get(head, ()), with_counts) for head in heads)] for name, row in placed.items()]
    widest = [max(map(len, column)) for column in zip(*rows, strict=True)]
    broken = [_fold(head, max(least, longest)) for head, least in zip(heads, widest[1:], strict=True)]
    above = max(map(len, broken))
    top = [["", *(([""] * (above - len(each)) + each)[at] for each in broken)] for at in range(above)]
    return [f" {line}" for line in aligned([*top, *rows])]


def _entries(cells: Sequence[CellView], with_counts: bool) -> str:
    return " ".join(_entry(cell.row, with_counts) for cell in cells)


def _fold(head: str, longest: int) -> list[str]:
    parts = head.split("-")
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 1 + len(part) <= longest:
            lines[-1] += f"-{part}"
        else:
            lines.append(part)
    return lines


def _named_entries(placed: Mapping[str, Mapping[str, Sequence[CellView]]], width: int) -> list[str]:
    """Return a row for each scenario, whose entries name themselves: "✔ mha  ✘ nsa"."""
    first = min(max(map(len, placed)), width // 3)
    lines = []
    for name, row in placed.items():
        marks = {column: "".join(_entry(cell.row, False) for cell in cells) for column, cells in row.items()}
        entries = [f"{each}{' ' * (len(each) > 1)}{column}" for column, each in marks.items()]
        lines += hanging(f" {name:<{first}}  ", entries, width, indent=first + 3)
    return lines


def in_fields(parts: Sequence[str], width: int) -> list[str]:
    """Return the parts, unbroken and three blanks apart, in lines of `width`."""
    return hanging("", parts, width, indent=3, between="   ")


def below_lines(record: RunRecord, width: int) -> list[str]:
    """Return what was compared, not reached and not tried."""
    lines = labelled("compared", compared_text(record), width, 2)
    situations = situation_view(record)
    if situations is not None and situations.never and record.complete and not record.findings:
        reached, _, known = situations.reached.partition(" of ")
        missing = int(known) - int(reached)
        named = "; ".join(situations.never)
        lines += labelled("not reached", f"{missing} of {counted(int(known), 'situation')}: {named}", width, 2)
    return lines + _not_tried(record, width)


def note_lines(notes: Sequence[str], width: int) -> list[str]:
    """Return the notes as lines; of those that differ in numbers alone the last."""
    lines: list[str] = []
    notes = [*{re.sub(r"[\d,]+", "0", note): note for note in notes}.values()]
    for note in notes[:MOST_NOTES]:
        label, _, text = note.partition(": ")
        label, text = (label, text) if label in NOTED else ("note", note)
        why, _, command = text.partition("; next: ")
        lines += labelled(label, why, width, 2)
        lines += [f"{'':{LABEL + 1}}next: {command}"] if command else []
    if len(notes) > MOST_NOTES:
        lines += labelled("", f"and {len(notes) - MOST_NOTES} more: see the report", width)
    return lines


def compared_text(record: RunRecord) -> str:
    done = record.evidence
    if server_of(record) is not None:
        return ", ".join(counted(count, noun) for count, noun in reversed(work_counts(record)))
    words = sum(done.words_verified.values())
    counts = [(words, "word"), (done.orderings_checked or 0, "ordering")]
    parts = [f"{short_count(count)} {plural(count, noun)}" for count, noun in counts if count]
    return f"{' and '.join(parts) or 'nothing'} in {counted(done.schedules, 'schedule')}"


def short_count(number: int) -> str:
    """Return "812", "64.9 k" or "1.2 M"."""
    for unit, name in ((1_000_000_000, "G"), (1_000_000, "M"), (10_000, "k")):
        if number >= unit:
            return f"{number / (1000 if name == 'k' else unit):.3g} {name}"
    return f"{number:,}"


def _not_tried(record: RunRecord, width: int) -> list[str]:
    """Return the schedules and strategies that passing cells left out, and the command that goes on."""
    passing = [row for row in record.scenarios if row.verdict is Verdict.PASS and row.coverage is not None]
    coverages = [row.coverage for row in passing if row.coverage is not None]
    left = sum(max(0, row.coverage.wanted - row.schedules) for row in passing if row.coverage is not None)
    if not record.complete or server_of(record) is not None or not (left or any(each.not_tried for each in coverages)):
        return []
    kinds = Counter(kind for each in coverages for kind in {name.partition(":")[0] for name in each.not_tried})
    ordered = sorted(kinds.items(), key=lambda row: (-row[1], row[0]))[:MOST_NAMED]
    named = ", ".join(
        f"{kind if kind.endswith('s') else plural(2, kind)} in {counted(count, 'cell')}" for kind, count in ordered
    )
    planned = sum(each.wanted for each in coverages)
    text = f"{left:,} of {counted(planned, 'planned schedule')}" if left else ""
    lines = labelled("not tried", "; some ".join(filter(None, (text, named))), width, 2)
    return [*lines, f"{'':{LABEL + 1}}go on: {go_on(record)}"] if left else lines


def go_on(record: RunRecord) -> str:
    """Return the command that repeats the run with ten times its time."""
    seconds = max(60, round(record.duration_s * 10, -1))
    words, argv = [], record.repro.split()
    for at, word in enumerate(argv):
        if word == "--max-time" or word.startswith("--max-time=") or (at and argv[at - 1] == "--max-time"):
            continue
        words.append(word)
    return f"{' '.join(words)} --max-time {seconds:.0f}"


def unknown_lines(record: RunRecord, width: int) -> list[str]:
    """Return a reason against a pass with its cells, for each kind of reason."""
    by_reason: dict[str, list[str]] = {}
    for row in record.scenarios:
        if row.verdict is not Verdict.PASS and (why := why_text(row)):
            by_reason.setdefault(f"{MARK[row.verdict]} {why}", []).append(row.id)
    lines: list[str] = []
    for why, cells in list(by_reason.items())[:MOST_REASONS]:
        lines += wrapped(f" {why[0]} {counted(len(cells), 'cell')}: {why[2:]} ({some_of(cells, MOST_NAMED)})", width)
    if len(by_reason) > MOST_REASONS:
        lines.append(f"   and {counted(len(by_reason) - MOST_REASONS, 'more reason')}: see the report")
    return lines


def cause_lines(record: RunRecord, width: int, reviewed: Reviewed, *, is_kept: bool) -> list[str]:
    """Return a card for each of the first causes, the others counted; a line for each condition.

    reviewed: conditional findings that are known to be harmless, by cell and reason. is_kept: RUN#N can be looked up.
    """
    known = {finding.id for found in reviewed.values() for finding in found}
    cards = cards_of([finding for finding in record.findings if finding.id not in known])
    causes = [each for each in cards if not each.is_conditional]
    lines: list[str] = []
    for number, each in enumerate(causes[:MOST_CAUSES], 1):
        lines += [*_card_lines(number, each, record if is_kept else None, width), ""]
    if more := causes[MOST_CAUSES:]:
        codes = ", ".join(f"{each.finding.code} in {each.finding.cell}" for each in more)
        lines += [*wrapped(f" and {counted(len(more), 'more cause')} in the report: {codes}", width), ""]
    for each in cards:
        lines += wrapped(f" ~ {condition_text(each)}", width) if each.is_conditional else []
    by_reason: dict[str, list[Finding]] = {}
    for (_, why), known_ones in reviewed.items():
        by_reason.setdefault(why, []).extend(known_ones)
    for why, of_reason in by_reason.items():
        cells = cells_text([*dict.fromkeys(each.cell for each in of_reason)])
        told = f" ~ {counted(len(of_reason), 'conditional finding')}, reviewed for this release: {why} ({cells})"
        lines += wrapped(told, width)
    return [*lines, *([""] if lines and lines[-1] else [])]


def _card_lines(number: int, card: Card, record: RunRecord | None, width: int) -> list[str]:
    head = f" ✘ {number}  {card.finding.code} {card.title}   {cells_text(card.cells)}"
    count = f"   {counted(1 + len(card.others), 'finding')}" if card.others else ""
    lines = textwrap.wrap(head + count, width, subsequent_indent=" " * (LABEL + 1), break_on_hyphens=False)
    for label, text in facts_of(card, record).items():
        lines += [f"    {label:<8}  {text}"] if label in COPIED else labelled(f"   {label}", text, width, 4)
    return lines


def verdict_line(record: RunRecord) -> str:
    ended = [row for row in record.scenarios if row.reason != STOPPED]
    verdicts = [*(row.verdict for row in ended), *(row.verdict for row in record.mutants)]
    noun = "mutant" if record.mutants else "cell" if server_of(record) is None else "scenario"
    first, _, others = verdicts_text(verdicts, KILLED if record.mutants else ENDED).partition(" ")
    parts = [f"{counted(int(first), noun)} {others}"] if first else []
    if left := len(record.scenarios) - len(ended):
        parts.append(f"{counted(left, noun)} not ended")
    if conditional := sum(finding.condition is not None for finding in record.findings):
        parts.append(counted(conditional, "conditional finding"))
    state = "" if record.complete else "   (interrupted: partial)"
    work = ", ".join(counted(count, noun) for count, noun in work_counts(record))
    if record.bench:
        usable = sum(map(is_enough, record.bench))
        least = min(len(row.ratios) for row in record.bench)
        what = "checked" if any(map(is_check, record.bench)) else "with a price"
        work = f"{usable} of {counted(len(record.bench), 'row')} {what}, rounds: {least} or more"
    judged = ", ".join(parts) or "nothing was judged"
    return f" {record.verdict.value.upper()}  {judged}; {work}; {record.duration_s:.1f} s{state}"


def screen_lines(
    record: RunRecord, width: int, reviewed: Reviewed, *, untried: Sequence[str] = (), is_kept: bool = True
) -> list[str]:
    """Return the screen of a run that has ended. untried: notes for its reader. is_kept: its record is stored."""
    grid = [] if record.bench and server_of(record) is None else grid_lines(record, width)
    below = [*(below_lines(record, width) if grid else ()), *note_lines(untried, width), *unknown_lines(record, width)]
    if record.bench:
        below += labelled("in short", in_short(record.bench), width)
    causes = cause_lines(record, width, reviewed, is_kept=is_kept)
    parts = [*grid, *([""] if grid else []), *below, *([""] if below else []), *causes]
    return [*parts, *wrapped(verdict_line(record), width)]
