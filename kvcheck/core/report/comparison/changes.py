"""Changes: differences between an earlier and a later run of the same cells, by cell and cause.

Invariants:
- A cause is fixed only if its cell passed in the later run with as many schedules as a pass needs.
- A failure that only the later run judged is new, whether or not the earlier run could have shown it.
- Runs of different engines, of different kvcheck builds, or cut short cannot be compared: exit 4.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcheck.core.base.causes import NUMBERS, place_of
from kvcheck.core.base.codes import CODES
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import short
from kvcheck.core.base.nouns import counted, some_of
from kvcheck.core.base.record import LEFT_OUT, BenchRow, Finding, Identity, RunRecord, ScenarioResult, Verdict, to_plain
from kvcheck.core.base.server_facts import server_of
from kvcheck.core.report.cards import cards_of
from kvcheck.core.report.gate.baseline import engine_name, is_cut, roots
from kvcheck.core.report.gate.contradictions import BUILTIN, absent_of, contradictions
from kvcheck.core.report.gate.judge import Rules
from kvcheck.core.report.gate.result import has_enough
from kvcheck.core.run.store import writer_of

SCHEMA_VERSION = "1"
NAMED = 6


class ChangeState(Enum):
    NEW = "new"
    """A cause that only the later run shows, or a cell that fails in it alone: exit 1."""
    CONDITIONAL = "conditional"
    """A conditional finding that is new; NEW with --fail-on-conditional."""
    LESS = "less evidence"
    """A cell that the later run did not judge, or judged with less than a share of the evidence: exit 4."""
    SLOWER = "slower"
    """A price whose interval lies above the earlier one's; never an exit code."""
    FIXED = "fixed"
    """A cause that the later run does not show, although its cell passed with enough evidence."""
    SAME = "same"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One difference. code and place: None for a cell or a price. conditional: it fails nothing. card: the number of
    its likely cause on the screen of its run."""

    state: ChangeState
    cell: str
    code: str | None = None
    place: str | None = None
    text: str
    replay: str | None = None
    conditional: bool = False
    card: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All differences of two runs. problems: reasons why they cannot be compared."""

    schema_version: str = SCHEMA_VERSION
    before: str
    after: str
    rows: tuple[Change, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    def of(self, state: ChangeState) -> tuple[Change, ...]:
        return tuple(row for row in self.rows if row.state is state)

    def grouped(self, state: ChangeState) -> tuple[tuple[Change, ...], ...]:
        """Group differences by the cards of the run that shows them."""
        found: dict[tuple[object, ...], list[Change]] = {}
        for row in self.of(state):
            found.setdefault(_group(row), []).append(row)
        return tuple(map(tuple, found.values()))

    @property
    def exit_code(self) -> int:
        if self.of(ChangeState.NEW):
            return 1
        return 4 if self.problems or any(not row.conditional for row in self.of(ChangeState.LESS)) else 0

    @property
    def verdict(self) -> str:
        return {0: "PASS", 1: "FAIL"}.get(self.exit_code, "UNKNOWN")

    @property
    def summary(self) -> str:
        told = [f"{len(rows)} {state.value}" for state in ChangeState if (rows := self.of(state))]
        told += [f"not comparable for {counted(len(self.problems), 'reason')}"] if self.problems else []
        return ", ".join(told) or "no difference"

    def plain(self) -> dict[str, object]:
        plain = to_plain(self)
        assert isinstance(plain, dict), "a dataclass becomes a dict"
        return plain | {"verdict": self.verdict.lower(), "exit_code": self.exit_code}

    def to_json(self) -> str:
        return json.dumps(self.plain(), indent=1, allow_nan=False) + "\n"


def change_lines(found: Changes) -> list[tuple[ChangeState, int, list[tuple[str, str | None]]]]:
    """Return the number of changes of each state, and a line for each group, with its replay line if it is new."""
    return [
        (state, len(found.of(state)), [(line_of(rows), replay_of(rows)) for rows in found.grouped(state)])
        for state in ChangeState
        if found.of(state)
    ]


def line_of(rows: Sequence[Change]) -> str:
    text = "; beside ".join(filter(None, (rows[0].text, beside_text(rows))))
    return f"{head_of(rows)}: {text}"


def head_of(rows: Sequence[Change]) -> str:
    """Return the code of a group with its title, its cells, and the number of its changes where it is another."""
    first, cells = rows[0], [*dict.fromkeys(row.cell for row in rows)]
    cell = f"{'' if len(cells) == 1 else f'{len(cells)} cells: '}{some_of(cells, NAMED)}"
    known = CODES.get(first.code or "")
    named = " ".join(filter(None, (first.code, known.title if known else None)))
    count = f"{len(rows)} changes" if len(rows) > len(cells) else ""
    return "   ".join(filter(None, (named, cell, count)))


def beside_text(rows: Sequence[Change]) -> str:
    """Return the other codes of a group."""
    beside = Counter(row.code for row in rows if row.code and row.code != rows[0].code)
    return ", ".join(f"{code} x{times}" for code, times in beside.items())


def replay_of(rows: Sequence[Change]) -> str | None:
    return rows[0].replay if rows[0].state is ChangeState.NEW else None


def _group(row: Change) -> tuple[object, ...]:
    """Key of a group: its card, and the reason of what is not new. Each price is a group of its own."""
    if row.state is ChangeState.SLOWER:
        return row.cell, row.text
    is_seen = row.card is not None and row.state not in (ChangeState.FIXED, ChangeState.LESS)
    return row.card, "" if is_seen else NUMBERS.sub("#", row.text.removeprefix(row.place or ""))


def changes(before: RunRecord, after: RunRecord, *, share: float, conditional: bool = False) -> Changes:
    """Compare two runs. share: part of the earlier evidence that a passing cell needs. conditional: such findings fail.

    Raises UsageError if both are the same run.
    """
    if before.run_id == after.run_id:
        raise UsageError(f"run {after.run_id} was given twice; expected an earlier and a later run")
    found = [*_causes(before, after, counts=conditional), *_bare_failures(before, after)]
    told = {row.cell for row in found if row.state is ChangeState.LESS}
    found += [row for row in _cells(before, after, share) if row.cell not in told]
    prices, notes = _prices(before, after)
    order = list(ChangeState)
    return Changes(
        before=before.run_id,
        after=after.run_id,
        rows=tuple(sorted((*found, *prices), key=lambda row: order.index(row.state))),
        problems=tuple(_problems(before, after)),
        notes=(*notes, *_notes(before, after)),
    )


Cause = tuple[str, str, str]


def _by_cause(record: RunRecord) -> dict[Cause, tuple[int, Finding]]:
    """Return the causes with the number of their card, in the order of the run's screen."""
    causes = {id(each) for at, each in roots(record.findings) if each is record.findings[at]}
    found: dict[Cause, tuple[int, Finding]] = {}
    for number, card in enumerate(cards_of(record.findings), 1):
        for each in (card.finding, *card.others):
            if id(each) in causes:
                found.setdefault(_cause(each), (number, each))
    return found


def _cause(finding: Finding) -> Cause:
    return finding.cell, finding.code, place_of(finding)


def _causes(before: RunRecord, after: RunRecord, *, counts: bool) -> Iterator[Change]:
    """Changes by cause. A cause that the other run shows as a symptom counts as shown."""
    then, now = _by_cause(before), _by_cause(after)
    shown_then, shown_now = ({_cause(each) for each in record.findings} for record in (before, after))
    rows_then, rows_now = _rows(before), _rows(after)
    for cause, (card, finding) in now.items():
        is_new = cause not in shown_then
        text = finding.message.splitlines()[0] if finding.message else ""
        if is_new and (why := _unseen(rows_then.get(finding.cell))):
            text = f"{text} ({why} in {before.run_id})"
        yield _change(ChangeState.NEW if is_new else ChangeState.SAME, finding, text, card, counts=counts)
    # Causes that the later run does not show: fixed only if the cell passed on enough schedules.
    for cause, (card, finding) in then.items():
        if cause in shown_now:
            continue
        row = rows_now.get(finding.cell)
        if row is None and finding.cell in absent_of(after):
            continue
        if row is not None and row.verdict is Verdict.PASS and has_enough(after, row):
            text = f"gone after {counted(row.schedules, 'schedule')}"
            yield _change(ChangeState.FIXED, finding, text, card, counts=counts)
            continue
        text = f"not seen, and {_unseen(row) or 'too few schedules ran'}"
        if row is not None and row.verdict is Verdict.FAIL:
            text = "not seen, but the cell fails otherwise, which ends it"
        yield _change(ChangeState.LESS, finding, text, card, counts=counts)


def _change(state: ChangeState, finding: Finding, text: str, card: int, *, counts: bool) -> Change:
    is_latent = finding.condition is not None and not counts
    if state not in (ChangeState.NEW, ChangeState.SAME):
        text = f"{place_of(finding)}: {text}"
    return Change(
        state=ChangeState.CONDITIONAL if is_latent and state is ChangeState.NEW else state,
        cell=finding.cell,
        code=finding.code,
        place=place_of(finding),
        text=text,
        replay=finding.replay or None,
        conditional=is_latent,
        card=card,
    )


def _unseen(row: ScenarioResult | None) -> str:
    """Why a cell could not show a finding; empty if it could."""
    if row is None:
        return "the cell was not run"
    if row.verdict is Verdict.UNKNOWN:
        return "the cell was UNKNOWN"
    if row.verdict is Verdict.FAIL and row.coverage is not None and row.schedules < row.coverage.wanted:
        return f"the cell ended after {row.schedules} of {counted(row.coverage.wanted, 'schedule')}"
    return ""


def _bare_failures(before: RunRecord, after: RunRecord) -> Iterator[Change]:
    then = {**_verdicts(before)}
    with_findings = {each.cell for each in after.findings}
    for name, verdict in _verdicts(after).items():
        if verdict is Verdict.FAIL and name not in with_findings:
            state = ChangeState.SAME if then.get(name) is Verdict.FAIL else ChangeState.NEW
            yield Change(state=state, cell=name, text="fails, and no finding says why")


def _cells(before: RunRecord, after: RunRecord, share: float) -> Iterator[Change]:
    now = _rows(after)
    for row in before.scenarios:
        if row.verdict is Verdict.UNKNOWN:
            continue
        other = now.get(row.id)
        if other is None and row.id in absent_of(after):
            continue
        if other is None or other.verdict is Verdict.UNKNOWN:
            reason = f": {other.reason}" if other is not None and other.reason else ""
            yield Change(state=ChangeState.LESS, cell=row.id, text=f"judged before, and now {_unseen(other)}{reason}")
        elif row.verdict is other.verdict is Verdict.PASS:
            thin = [
                f"{now_count:,} {noun} after {then_count:,}"
                for noun, then_count, now_count in _evidence(row, other)
                if now_count < share * then_count
            ]
            if thin:
                yield Change(state=ChangeState.LESS, cell=row.id, text=f"passes on {', '.join(thin)}")


def _evidence(row: ScenarioResult, other: ScenarioResult) -> Iterator[tuple[str, int, int]]:
    then, now = row.evidence, other.evidence
    yield "schedules", row.schedules, other.schedules
    yield "words", sum(then.words_verified.values()), sum(now.words_verified.values())
    yield "situations", sum(map(bool, then.situations.values())), sum(map(bool, now.situations.values()))


def _prices(before: RunRecord, after: RunRecord) -> tuple[list[Change], list[str]]:
    then = {_price(row): row for row in before.bench}
    pairs = [(then[_price(row)], row) for row in after.bench if _price(row) in then]
    if not pairs:
        return [], []
    for name in ("hardware", "torch"):
        old, new = before.environment.get(name), after.environment.get(name)
        if old != new:
            return [], [f"prices are not compared: their {name} differs"]
    return [
        Change(
            state=ChangeState.SLOWER,
            cell=new.id,
            text=f"{new.ratio.est:.3g} times {new.baseline}, after {old.ratio.est:.3g}; kvcheck gate --budget decides",
        )
        for old, new in pairs
        if _is_slower(old, new)
    ], []


def _price(row: BenchRow) -> tuple[str, str, str]:
    return row.id, row.baseline, row.device


def _is_slower(old: BenchRow, new: BenchRow) -> bool:
    """Judge by the gate's shares, with the earlier ratio as the budget and both noise floors added."""
    if old.ratio.hi is None or new.ratio.lo is None or "unknown" in (old.status, new.status):
        return False
    rules = Rules()
    certain = old.ratio.hi * (1 + max(rules.tol, old.floor + new.floor))
    return new.ratio.est >= old.ratio.est * (1 + rules.fail_over) and new.ratio.lo > certain


def _problems(before: RunRecord, after: RunRecord) -> Iterator[str]:
    first, second = engine_name(before), engine_name(after)
    if first != second:
        yield f"{before.run_id} judged {first}, and {after.run_id} judged {second}"
    codes = [None if each.identity is None else each.identity.code for each in (before, after)]
    if BUILTIN not in (first, second) and (None in codes or codes[0] != codes[1]):
        yield f"two kvchecks judged them: {short(codes[0])} and {short(codes[1])}; run both again with one"
    traces = [None if each.identity is None else each.identity.trace for each in (before, after)]
    if traces[0] != traces[1]:
        yield f"two traces were fed to them: {short(traces[0])} and {short(traces[1])}"
    for record in (before, after):
        if not record.complete:
            yield f"{record.run_id} was cut short; next: {record.repro}"
        if wrong := contradictions(record):
            yield f"{record.run_id} contradicts itself: {wrong[0]}"
        if is_cut(record):
            yield f"{record.run_id}: {LEFT_OUT}; make a run of fewer cells"
    judged = [
        {name for name, verdict in _verdicts(each).items() if verdict is not Verdict.UNKNOWN}
        for each in (before, after)
    ]
    if not judged[0] & judged[1]:
        yield "no cell was judged in both runs"


def _notes(before: RunRecord, after: RunRecord) -> Iterator[str]:
    if before.seed != after.seed and not (before.bench and after.bench):
        yield f"their seeds differ ({before.seed} and {after.seed}), so their schedules do too"
    for cell, why in absent_of(after).items():
        if cell in _rows(before):
            yield f"{cell}: not in the later release: {why}"
    added = [name for name in _rows(after) if name not in _rows(before)]
    if added:
        more = ", ..." if len(added) > NAMED else ""
        yield f"only {after.run_id} ran {counted(len(added), 'cell')}: {', '.join(added[:NAMED])}{more}"


def _verdicts(record: RunRecord) -> Mapping[str, Verdict]:
    return {**{row.id: row.verdict for row in record.scenarios}, **{row.name: row.verdict for row in record.mutants}}


def _rows(record: RunRecord) -> dict[str, ScenarioResult]:
    return {row.id: row for row in record.scenarios}


def version_of(record: RunRecord) -> str:
    """Return the version judged, with commit and digest of its files, which separate two states of one version."""
    if server_of(record) is not None:
        return engine_name(record)
    engine = record.environment.get("engine")
    if not isinstance(engine, dict):
        identity = record.identity or Identity()
        name = BUILTIN if identity.target is None else short(identity.target)
        return f"{name} of kvcheck {record.tool.get('version', 'unknown')}, code {short(identity.code)}"
    named = [f"{name} {short(str(engine[name]))}" for name in ("commit", "files") if engine.get(name)]
    return ", ".join((f"{engine.get('engine')} {engine.get('version')}", *named))


write_json = writer_of(Changes.to_json)
