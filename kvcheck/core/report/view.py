"""The view of a record: cells, counts and places as plain rows, from which texts and pages are made; causes: cards.py.

Invariants:
- Texts are the record's own. Each format escapes and cuts them for itself.
- A value that does not apply is None or "", never 0.
- A value that the server does not report is "n/a"; 0 is a count that was read.
- A record comes from a file: facts may have any type.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Evidence, Finding, Identity, MutantResult, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.server_facts import OWN_MODEL, REQUIRED, SERVE_CASES, TOKEN, is_requirement, required, server_of
from kvcheck.core.report.cards import Card
from kvcheck.core.report.prices import in_short
from kvcheck.core.report.wording import (
    WORST_FIRST,
    amount,
    conditional_text,
    coverage_text,
    evidence_text,
    in_order,
    replay_line,
    why_text,
)

MOST_COLUMNS = 10
LEAST_FILLED = 0.4
"""Smallest share of filled places in a matrix of cells. Below it, each row lists its cells."""
MOST_OPEN = 12
"""Most cells without a cause that are listed before the others."""
MAP_AXIS = 48
FOUND = {"killed": "K", "reproduced": "K"}
"""Marks in the matrix for a mutant that its own oracle found, by outcome."""
LACKING = {"survived": "missed", "killed-by-other": "missed", "not-begun": "not run"}
"""Marks for a mutant that its own oracle did not find, by outcome; other outcomes are not judged."""
MOST_SUSPECTS = 12
MOST_LAYERS = 192
MOST_POSITIONS = 1 << 24
NO_REASON = "no reason was recorded"
SOURCES = "evidence"
"""The fact with the source of each kind of evidence."""
ARM_COLUMNS = ("requests", "tokens", "cached", "compared", "other", "flips")
"""Counts of an arm of a model of the user's own, beside its largest deviation."""


def headline(record: RunRecord, cards: Sequence[Card]) -> tuple[str, str, str]:
    """Return (summary, message, command): the worst cause, else why the run is no pass, else what it judged."""
    if cards and (record.verdict is Verdict.FAIL or not cards[0].is_conditional):
        worst = cards[0]
        message = f"{worst.finding.code} {worst.title}: {worst.finding.message}"
        return _causes_text(record, cards), message, replay_line(record, worst.finding)
    failing = [row for row in record.mutants if row.verdict is Verdict.FAIL]
    if failing:
        row = failing[0]
        summary = f"{len(failing)} of {counted(len(record.mutants), 'mutant')} not found as expected"
        return summary, ": ".join(filter(None, (row.name, row.outcome, row.message))), row.replay or record.repro
    if record.verdict is not Verdict.PASS:
        return "not judged", _why_not(record), record.repro
    if record.bench:
        return "price list", in_short(record.bench), record.repro
    return (_causes_text(record, cards) or "no finding", f"Judged: {judged_text(record)}.", record.repro)


def _causes_text(record: RunRecord, cards: Sequence[Card]) -> str:
    counts = [
        (sum(not each.is_conditional for each in cards), "likely cause"),
        (sum(each.condition is not None for each in record.findings), "conditional finding"),
    ]
    return ", ".join(counted(count, noun) for count, noun in counts if count)


def _why_not(record: RunRecord) -> str:
    for verdict in WORST_FIRST[:2]:
        for row in record.scenarios:
            if row.verdict is verdict:
                return f"{row.id}: {why_text(row) or NO_REASON}"
        for mutant in record.mutants:
            if mutant.verdict is verdict:
                return f"{mutant.name}: {mutant.outcome}; {mutant.message or NO_REASON}"
    return next(iter(record.warnings), "No scenario ran, so nothing was judged. This is not a pass.")


def judged_text(record: RunRecord) -> str:
    if record.mutants and not record.scenarios:
        found = sum(row.verdict is Verdict.PASS for row in record.mutants)
        return f"{counted(len(record.mutants), 'mutant')}, {found} found by the oracle that has to find it"
    text = evidence_text(record.evidence) or "nothing counted"
    planned = [row.coverage.wanted for row in record.scenarios if row.coverage is not None]
    if server_of(record) is not None or not planned or len(planned) < len(record.scenarios):
        return text
    return f"{counted(len(record.scenarios), 'cell')}, of {counted(sum(planned), 'planned schedule')}: {text}"


ENDED = {Verdict.FAIL: "failed", Verdict.UNKNOWN: "unknown", Verdict.PASS: "passed"}
KILLED = {Verdict.FAIL: "survived", Verdict.UNKNOWN: "unknown", Verdict.PASS: "killed"}
"""The same of mutants."""


def verdicts_text(verdicts: Iterable[Verdict], words: Mapping[Verdict, str] = ENDED) -> str:
    """Return "1 failed, 2 passed"; "" for none."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[verdict]} {word}" for verdict, word in words.items() if counts[verdict])


def work_counts(record: RunRecord) -> list[tuple[int, str]]:
    """Return (count, noun) of the work that was judged: of a server its rounds, requests and tokens."""
    done = record.evidence
    if server_of(record) is not None:
        tokens = done.observed.get(TOKEN, 0)
        return [(done.schedules, "round"), (done.requests, "request"), (tokens, "judged token")]
    if record.mutants and not record.scenarios:
        return [(sum(row.schedules for row in record.mutants), "schedule")]
    return [(done.schedules, "schedule"), (done.events, "event")]


def counts_of(record: RunRecord) -> list[tuple[int, str]]:
    """Return (count, label) of everything that the head of a page counts; of counts of 0 only the findings."""
    noun = "cell" if server_of(record) is None else "scenario"
    by_verdict = [(sum(row.verdict is verdict for row in record.scenarios), verdict) for verdict in WORST_FIRST]
    found, mutants = sum(row.verdict is Verdict.PASS for row in record.mutants), len(record.mutants)
    words, findings = sum(record.evidence.words_verified.values()), len(record.findings)
    return [
        (findings, plural(findings, "finding")),
        *((count, f"{plural(count, noun)} {verdict.value.upper()}") for count, verdict in by_verdict if count),
        *([(found, f"of {counted(mutants, 'mutant')} found as expected")] if mutants else []),
        *((count, plural(count, of)) for count, of in work_counts(record) if count),
        *([(words, f"{plural(words, 'word')} verified")] if words else []),
    ]


@dataclass(frozen=True, kw_only=True)
class CellView:
    """A cell of the record. number: its place there. line, column: its place in the matrix."""

    number: int
    row: ScenarioResult
    line: str
    column: str
    conditional: str

    @cached_property
    def why(self) -> str:
        return "; ".join(filter(None, (why_text(self.row), self.conditional)))

    @property
    def planned(self) -> str:
        return "" if self.row.coverage is None else f"/{self.row.coverage.wanted:,}"

    @property
    def tried(self) -> str:
        coverage = self.row.coverage
        return coverage_text(coverage) if coverage is not None and coverage.tried else ""

    @property
    def evidence(self) -> str:
        evidence = self.row.evidence
        return "" if evidence == Evidence(schedules=evidence.schedules) else evidence_text(evidence, but=("schedules",))


def cells_of(record: RunRecord) -> tuple[CellView, ...]:
    return tuple(
        CellView(
            number=number, row=row, line=line, column=column, conditional=conditional_text(row.id, record.findings)
        )
        for number, row in enumerate(record.scenarios, 1)
        if not record.bench or row.verdict is not Verdict.PASS
        for line, column in [_place_of(row, is_probe="engine" in record.environment)]
    )


def _place_of(row: ScenarioResult, *, is_probe: bool) -> tuple[str, str]:
    """The scenario, with its transport or probe, and a shape or a variant."""
    scenario = row.id.removesuffix(f"/{row.shape}")
    if is_probe:
        probe, _, variant = row.shape.partition(".")
        return f"{scenario} · {probe}", variant
    shape, slash, transport = row.shape.partition("/")
    return f"{scenario} over {transport}" if slash else scenario, shape


def cell_matrix(record: RunRecord, cells: Sequence[CellView]) -> tuple[list[str], dict[str, dict[str, list[CellView]]]]:
    """Return the columns, those of a family side by side, and the cells by row and column."""
    families = families_of(record)
    rows: dict[str, dict[str, list[CellView]]] = {}
    for cell in cells:
        rows.setdefault(cell.line, {}).setdefault(cell.column, []).append(cell)
    kinds = [*dict.fromkeys(families.values())]
    columns = sorted(
        dict.fromkeys(column for row in rows.values() for column in row),
        key=lambda column: kinds.index(families[column]) if column in families else len(kinds),
    )
    is_full = sum(map(len, rows.values())) >= LEAST_FILLED * len(rows) * len(columns)
    return columns if is_full and len(columns) <= MOST_COLUMNS else [], rows


def families_of(record: RunRecord) -> dict[str, str]:
    found = record.plan.get("families")
    return {str(name): str(family) for name, family in found.items()} if isinstance(found, dict) else {}


def in_reading_order(record: RunRecord, cells: Sequence[CellView]) -> tuple[list[CellView], int]:
    """Return the cells, those that no cause explains first, and how many of them are shown unfolded."""
    explained = {finding.cell for finding in record.findings}
    open_ = [cell for cell in cells if cell.row.verdict is not Verdict.PASS and cell.row.id not in explained]
    ordered = sorted(cells, key=lambda cell: (cell not in open_, WORST_FIRST.index(cell.row.verdict)))
    return ordered, len(cells) if len(cells) == 1 or record.bench else min(len(open_), MOST_OPEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferMap:
    """Codes of the findings of a buffer by (layer, page). None: a finding names no layer or page."""

    buffer: str
    layers: tuple[int | None, ...]
    pages: tuple[int | None, ...]
    codes: Mapping[tuple[int | None, int | None], Sequence[str]]
    left_out: str


def maps_of(findings: Iterable[Finding]) -> list[BufferMap]:
    placed: dict[str, dict[tuple[int | None, int | None], list[str]]] = {}
    for each in findings:
        if each.buffer is not None and (each.layer is not None or each.page is not None):
            placed.setdefault(each.buffer, {}).setdefault((each.layer, each.page), []).append(each.code)
    return [_map(buffer, codes) for buffer, codes in sorted(placed.items())]


def _map(buffer: str, codes: Mapping[tuple[int | None, int | None], Sequence[str]]) -> BufferMap:
    axes = [sorted({key[at] for key in codes}, key=lambda value: (value is None, value or 0)) for at in (0, 1)]
    more = [f"{len(axis) - MAP_AXIS:,} more {name}" for axis, name in zip(axes, ("layers", "pages"), strict=True)]
    left_out = " and ".join(text for axis, text in zip(axes, more, strict=True) if len(axis) > MAP_AXIS)
    layers, pages = (tuple(axis[:MAP_AXIS]) for axis in axes)
    return BufferMap(buffer=buffer, layers=layers, pages=pages, codes=codes, left_out=left_out)


def oracles_of(mutants: Sequence[MutantResult]) -> list[str]:
    return sorted({name for row in mutants for name in (row.killer, _found_by(row)) if name})


def mark_of(row: MutantResult, oracle: str) -> str:
    if oracle == _found_by(row):
        return FOUND.get(row.outcome, "other code") if oracle == row.killer else "K"
    return LACKING.get(row.outcome, "not judged") if oracle == row.killer else ""


def _found_by(row: MutantResult) -> str | None:
    return row.killer if row.outcome in FOUND else (row.killed_by or "").partition(" ")[0] or None


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """read: position read by the wrong step in that layer, if known."""

    where: str
    read: int | None
    why: str


def suspects_of(minimal: Mapping[str, object] | None) -> tuple[list[Suspect], int]:
    """Return the first MOST_SUSPECTS rows of a finding and the number of others."""
    if minimal is None or minimal.get("test") not in ("walk", "position"):
        return [], 0
    given, wrong = minimal.get("suspects"), minimal.get("wrong")
    reads = wrong if isinstance(wrong, list) else []
    rows = [found for row in (given if isinstance(given, list) else []) if (found := _suspect(row, reads)) is not None]
    return rows[:MOST_SUSPECTS], max(0, len(rows) - MOST_SUSPECTS)


def _suspect(row: object, reads: list[object]) -> Suspect | None:
    """None for a row that names no place: a record comes from a file."""
    if not isinstance(row, dict):
        return None
    layer, page, head = _number(row.get("layer"), MOST_LAYERS - 1), _number(row.get("page")), _number(row.get("head"))
    first, last = _number(row.get("first")), _number(row.get("last"))
    if layer is None or page is None or first is None or last is None or last < first:
        return None
    why = row.get("why")
    of_head = "" if head is None else f", KV head {head}"
    return Suspect(
        where=f"layer {layer}{of_head}, page {page} (positions {first:,} to {last:,})",
        read=_number(reads[layer]) if layer < len(reads) else None,
        why=why if isinstance(why, str) else "",
    )


def _number(value: object, most: int = MOST_POSITIONS) -> int | None:
    return value if type(value) is int and 0 <= value <= most else None


def run_facts(record: RunRecord) -> dict[str, object]:
    identity = record.identity or Identity()
    return {
        "run": record.run_id,
        "code of kvcheck": short(identity.code),
        "content of the trace": short(identity.trace),
        "engine": short(identity.target),
        "command": " ".join(record.argv),
        "repeat with": record.repro,
        "seed": record.seed,
        "started": record.started_at,
        "duration": f"{record.duration_s:.1f} s",
        "exit code": record.exit_code,
        **record.plan,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """never: unknown rows, with the option that asked for each and its count. arms: (cell, arm) of the user's model."""

    never: list[tuple[ScenarioResult, str, str]]
    met: list[str]
    kinds: list[str]
    rows: list[ScenarioResult]
    arms: list[tuple[str, Mapping[str, object]]]
    recitals: list[tuple[str, Mapping[str, object]]]
    facts: dict[str, object]


def server_view(record: RunRecord) -> ServerView | None:
    server = server_of(record)
    if server is None:
        return None
    cells = [row for row in record.scenarios if not is_requirement(row) and row.id not in SERVE_CASES]
    own = _own_model(server)
    sources = server.get(SOURCES)
    read = sources if isinstance(sources, dict) else {}
    facts = {str(name): value for name, value in server.items() if value is not read and name != OWN_MODEL}
    return ServerView(
        never=[(row, *_asked(record, row)) for row in record.scenarios if row.verdict is Verdict.UNKNOWN],
        met=[
            ": ".join(_asked(record, row))
            for row in record.scenarios
            if is_requirement(row) and row.verdict is Verdict.PASS
        ],
        kinds=in_order(kind for row in cells for kind in row.evidence.observed),
        rows=sorted(cells, key=lambda row: WORST_FIRST.index(row.verdict)),
        arms=[(cell, arm) for cell, each in own for arm in _listed(each.get("arms")) if isinstance(arm, dict)],
        recitals=own,
        facts=facts | {f"{kind} was read from": read[kind] for kind in in_order(read)},
    )


def _asked(record: RunRecord, row: ScenarioResult) -> tuple[str, str]:
    """The option that made the row, or its id, and the count that the server reported."""
    if not is_requirement(row):
        return row.id, "not judged"
    kind = row.id.removeprefix(REQUIRED)
    least, seen = required(record).get(kind), record.evidence.observed.get(kind)
    told = "n/a: not reported by the server" if seen is None else f"{amount(kind, seen)} seen"
    return f"--require {kind}" + ("" if least is None else f"={least}"), told


def _listed(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _own_model(server: Mapping[str, object]) -> list[tuple[str, Mapping[str, object]]]:
    cells = server.get(OWN_MODEL)
    found = cells.items() if isinstance(cells, dict) else ()
    return [(str(cell).rpartition("/")[0], own) for cell, own in found if isinstance(own, dict)]
