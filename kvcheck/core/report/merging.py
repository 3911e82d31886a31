"""Merging: rows of several runs as the rows of one record, and checks that the runs may be merged.

Invariants:
- Runs that share a cell and seed are refused, so that counts of distinct traces add up.
- Worst verdict wins; counts are sums. A row that lacks evidence alone does not count against a sum that has enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kvcheck.core.base.cells import cell_of, is_of_server, keys_of, lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Coverage, Evidence, RunRecord, ScenarioResult, Verdict
from kvcheck.core.base.seeds import parse_seeds, parse_shard
from kvcheck.core.report.gate.contradictions import changes, contradictions

OF_CELLS = ("cells", "families", "shows")
LIMITS = ("max_time_s",)
OF_SEEDS = ("seeds", "shard")
NOT_EXERCISED = "KV990"
SCOPE = re.compile(r"(every schedule within .+), of ([\d,]+) workloads?")


def check_each(records: Sequence[RunRecord]) -> None:
    """Raise UsageError for a run that is no evidence by itself, or of another build than the first."""
    seen: dict[str, RunRecord] = {}
    for record in records:
        if record.run_id in seen:
            raise UsageError(f"run {record.run_id} is named twice; expected each run once")
        seen[record.run_id] = record
        if not record.complete:
            raise UsageError(f"run {record.run_id} was interrupted; go on with it first: {record.repro} --resume")
        if wrong := contradictions(record):
            raise UsageError(f"run {record.run_id} contradicts itself: {'; '.join(wrong)}")
        lines = lines_of(record.plan)
        if record.bench or record.mutants or not lines or any(map(is_of_server, lines)):
            raise UsageError(f"run {record.run_id}: expected a run of kvcheck stress or probe")
        if record.identity is None:
            raise UsageError(f"run {record.run_id} does not say which build of kvcheck made it")
        if changed := changes(records[0].identity, record.identity):
            first = records[0].run_id
            raise UsageError(f"run {record.run_id} is about something else than {first}: {'; '.join(changed)}")


def check_runs(records: Sequence[RunRecord]) -> None:
    """Raise UsageError for runs of different plans, or that share a cell and a seed."""
    first = records[0]
    owners: dict[str, list[tuple[range, RunRecord]]] = {}
    lines: dict[str, tuple[dict[str, str], RunRecord]] = {}
    for record in records:
        if differing := _differing(first.plan, record.plan):
            raise UsageError(
                f"run {record.run_id} is of another plan than {first.run_id}: they differ in {', '.join(differing)}"
            )
        for line in lines_of(record.plan):
            cell, seeds = cell_of(line, [row.id for row in record.scenarios]), _seeds_of(record.plan, line)
            for others, other in owners.setdefault(cell, []):
                if (seed := next((each for each in seeds if each in others), None)) is not None:
                    raise UsageError(
                        f"runs {other.run_id} and {record.run_id} both have {cell} with seed {seed}; expected each once"
                    )
            owners[cell].append((seeds, record))
            masked, whose = lines.setdefault(cell, (_without_seed(line), record))
            if masked != _without_seed(line):
                raise UsageError(f"runs {whose.run_id} and {record.run_id} have different plans of {cell}: {line}")


def _seeds_of(plan: Mapping[str, object], line: str) -> range:
    """The seeds with which a run has a cell. line: the cell's. Raises UsageError."""
    if "seeds" not in plan:
        seed = int(keys_of(line)["seed"])
        return range(seed, seed + 1)
    shard = plan.get("shard")
    return parse_shard(None if shard is None else str(shard), parse_seeds(str(plan["seeds"])))


def missing_shards(plans: Iterable[Mapping[str, object]]) -> str | None:
    numbers: dict[tuple[str, str], set[int]] = {}
    for plan in plans:
        number, _, count = str(plan.get("shard") or "1/1").partition("/")
        numbers.setdefault((str(plan.get("seeds")), count), set()).add(int(number))
    left = [
        f"{number}/{count} of seeds {seeds}"
        for (seeds, count), found in numbers.items()
        for number in range(1, int(count) + 1)
        if number not in found
    ]
    return f"{counted(len(left), 'shard')} missing, first {left[0]}: run all and merge them" if left else None


def merged_rows(
    parts: Iterable[tuple[str, Sequence[ScenarioResult]]],
    gap_of: Callable[[str, Evidence], str | None],
    missing: str | None,
) -> tuple[ScenarioResult, ...]:
    """parts: the name of each run, which reasons begin with, and its rows. gap_of: why so much evidence is too little
    for a pass of a cell; None where it is enough. missing: why no cell can pass; None: it can."""
    by_cell: dict[str, list[tuple[str, ScenarioResult]]] = {}
    for name, rows in parts:
        for row in rows:
            by_cell.setdefault(row.id, []).append((name, row))
    merged = [rows[0][1] if len(rows) == 1 else _merged(rows, partial(gap_of, cell)) for cell, rows in by_cell.items()]
    return tuple(
        replace(row, verdict=Verdict.UNKNOWN, code=NOT_EXERCISED, reason=missing)
        if missing is not None and row.verdict is Verdict.PASS
        else row
        for row in merged
    )


def _merged(named: Sequence[tuple[str, ScenarioResult]], gap: Callable[[Evidence], str | None]) -> ScenarioResult:
    rows = [row for _, row in named]
    evidence = Evidence(schedules=0)
    for row in rows:
        evidence = evidence.plus(row.evidence)
    if gap(evidence) is None:
        named = [each for each in named if each[1].reason is None or each[1].reason != gap(each[1].evidence)]
    verdict = Verdict.worst([*(row.verdict for _, row in named), *([] if named else [Verdict.PASS])])
    reasons = [f"{name}: {row.reason}" for name, row in named if row.reason and row.verdict is verdict]
    covered = [row.coverage for row in rows if row.coverage is not None]
    return ScenarioResult(
        id=rows[0].id,
        shape=rows[0].shape,
        verdict=verdict,
        code=next((row.code for _, row in named if row.verdict is verdict and row.code), None),
        reason="; ".join(reasons) or None,
        schedules=sum(row.schedules for row in rows),
        duration_s=round(sum(row.duration_s for row in rows), 3),
        evidence=evidence,
        coverage=_covered(covered) if len(covered) == len(rows) else None,
    )


def _covered(found: Sequence[Coverage]) -> Coverage:
    tried = tuple(dict.fromkeys(name for each in found for name in each.tried))
    left = dict.fromkeys(name for each in found for name in each.not_tried if name not in tried)
    return Coverage(
        wanted=sum(each.wanted for each in found),
        floor=sum(each.floor for each in found),
        tried=tried,
        not_tried=tuple(left),
        scope=_scope([each.scope for each in found]),
    )


def _scope(scopes: Sequence[str | None]) -> str | None:
    """Join scopes of one bound, adding their workloads; None if a scope is missing or bounds differ."""
    found = [SCOPE.fullmatch(scope or "") for scope in scopes]
    heads = {each[1] for each in found if each is not None}
    if None in found or len(heads) != 1:
        return None
    workloads = sum(int(each[2].replace(",", "")) for each in found if each is not None)
    return f"{heads.pop()}, of {counted(workloads, 'workload')}"


def _differing(one: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    names = sorted({*one, *other} - {*OF_CELLS, *OF_SEEDS, *LIMITS})
    return [name for name in names if one.get(name) != other.get(name)]


def _without_seed(line: str) -> dict[str, str]:
    return {key: value for key, value in keys_of(line).items() if key != "seed"}
