"""`kvcheck merge`: one record, with one verdict, of several runs: the shards of a campaign, or runs of other seeds.

Invariants:
- What is counted is counted once: runs that share a batch, or a cell and a seed, are refused with exit code 2.
- The shards of a campaign, merged, say what one campaign of the whole plan says. A shard that is missing makes all
  cells UNKNOWN that have no finding.
- The merged run is stored as any other: `kvcheck replay MERGED#N` finds its findings.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvcheck.commands.campaign_record import FACTS, check_results, tell_rows
from kvcheck.commands.closing import close
from kvcheck.commands.options import DEFAULT_OUT, FORMATS, Format, Out, Outputs, Reports, check_choice
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.cells import lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.identity import code_digest
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, RunRecord, ScenarioResult, read_record
from kvcheck.core.report.merging import LIMITS, OF_CELLS, check_each, check_runs, merged_rows
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import find_run

if TYPE_CHECKING:
    from kvcheck.core.stress.campaign.batches import BatchResult, CampaignPlan
    from kvcheck.core.stress.campaign.tally import Tally

MERGED = "merged"
"""The key of a plan that names the runs that a record was made from."""


def merge(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(help="Run ids or their unique starts, folders, or run.json files.")],
    out: Out = DEFAULT_OUT,
    output: Outputs = None,
    format_name: Format = "text",
    reports: Reports = True,
) -> int:
    """Read the runs, check that they can be taken together, and store what they say."""
    check_choice("--format", format_name, FORMATS)
    outputs = parse_outputs(output, format_name)
    if len(runs) < 2:
        raise UsageError(f"merge: expected two or more runs, got {len(runs)}; kvcheck report shows one")
    paths = [find_run(name, out) for name in runs]
    records = [read_record(path) for path in paths]
    check_each(records)
    of_campaigns = [_is_campaign(record) for record in records]
    if any(of_campaigns) and not all(of_campaigns):
        raise UsageError("merge: expected runs of kvcheck stress, or of kvcheck campaign; got both")
    if again := next((record for record in records if MERGED in record.plan), None):
        raise UsageError(f"run {again.run_id} was merged; name the runs that it was made from: {again.plan[MERGED]}")
    check_outputs(outputs)
    if all(of_campaigns):
        parts = _groups([(record, path.parent) for record, path in zip(records, paths, strict=True)])
    else:
        check_runs(records)
        parts = [_Part(name=record.run_id, records=[record]) for record in records]
    session = _session(ctx, records, parts)
    for found in _findings(parts):
        session.keep(found)
    session.results = [*merged_rows([(part.name, part.rows()) for part in parts])]
    _keep_ledger(session, parts)
    session.say(f"kvcheck {session.version}  merge  run {session.run_id}  {counted(len(records), 'run')}")
    session.say()
    record = session.record(complete=True)
    tell_rows(session, record)
    return close(session, outputs, reports=reports, interrupted=False)


@dataclass(slots=True, kw_only=True)
class _Part:
    """Runs whose rows are made together: the shards of one campaign, or one run. tally: None for a run."""

    name: str
    records: list[RunRecord]
    plan: CampaignPlan | None = None
    tally: Tally | None = None
    results: Sequence[BatchResult] = ()
    missing: str | None = None

    def findings(self) -> list[tuple[Finding, ...]]:
        """Those of each batch, or of the run."""
        return [self.records[0].findings] if self.tally is None else self.tally.findings()

    def rows(self) -> Sequence[ScenarioResult]:
        """Those of its cells."""
        if self.tally is None:
            return self.records[0].scenarios
        return self.tally.rows(itertools.chain.from_iterable(self.tally.findings()), missing=self.missing)


def _is_campaign(record: RunRecord) -> bool:
    return "answers_within" in record.plan and "seeds" in record.plan


def _groups(runs: Sequence[tuple[RunRecord, Path]]) -> list[_Part]:
    """The campaigns, each with its shards. Raises UsageError for runs that share a batch."""
    by_plan: dict[str, list[tuple[RunRecord, Path]]] = {}
    for record, folder in runs:
        key = repr(sorted((name, value) for name, value in record.plan.items() if name not in (*LIMITS, "shard")))
        by_plan.setdefault(key, []).append((record, folder))
    parts = [_part(group) for group in by_plan.values()]
    for one, other in itertools.combinations(parts, 2):
        _check_apart(one, other)
    return parts


def _part(group: Sequence[tuple[RunRecord, Path]]) -> _Part:
    """One campaign, from its shards. Raises UsageError for a shard that is there twice, and for damaged batches."""
    from kvcheck.core.stress.campaign.batches import WHOLE
    from kvcheck.core.stress.campaign.ledger import LEDGER, read_ledger
    from kvcheck.core.stress.campaign.tally import Tally

    plans = [plan_of(record) for record, _ in group]
    counts = {plan.shard.count for plan in plans}
    if len(counts) > 1:
        names = ", ".join(f"{record.run_id} {plan.shard}" for (record, _), plan in zip(group, plans, strict=True))
        raise UsageError(f"merge: expected shards of one number, got {names}")
    whole = plan_of(group[0][0], shard=WHOLE)
    tally = Tally(whole)
    owners: dict[int, str] = {}
    found: list[BatchResult] = []
    for (record, folder), plan in zip(group, plans, strict=True):
        other = owners.setdefault(plan.shard.number, record.run_id)
        if other != record.run_id:
            raise UsageError(f"runs {other} and {record.run_id} are both shard {plan.shard} of one campaign")
        results, _ = read_ledger(folder / LEDGER)
        check_results(results, plan, record.run_id)
        _check_counts(record, plan, results)
        for result in results:
            if result.within is not None or result.line not in {each.line for each in found if each.within is None}:
                tally.add(result)
                found.append(result)
    (count,) = counts
    left = [f"{number}/{count}" for number in range(1, count + 1) if number not in owners]
    return _Part(
        name=f"seeds {whole.seeds}",
        records=[record for record, _ in group],
        plan=whole,
        tally=tally,
        results=found,
        missing=f"missing {', '.join(left)}: run it with --shard and merge all" if left else None,
    )


def plan_of(record: RunRecord, shard: object = None) -> CampaignPlan:
    """The plan of a campaign's record. shard: another one than its own. Raises UsageError."""
    from kvcheck.core.run.plan import parse_line
    from kvcheck.core.stress.campaign.batches import CampaignPlan, Shard, parse_seeds, parse_shard

    given = record.plan
    workloads, within = given.get("workloads"), given["answers_within"]
    if not isinstance(within, int) or not (workloads is None or isinstance(workloads, int)):
        raise UsageError(f"run {record.run_id}: expected the plan of a campaign, got {within!r} answers, {workloads!r}")
    if record.identity is None or record.identity.code != code_digest():
        raise UsageError(f"run {record.run_id} is of another build of kvcheck than this one; merge it with that one")
    own = parse_shard(str(given.get("shard") or "1/1"))
    return CampaignPlan(
        cells=tuple(parse_line(line) for line in lines_of(given)),
        seeds=parse_seeds(str(given["seeds"])),
        workloads=workloads,
        within=within,
        shard=shard if isinstance(shard, Shard) else own,
    )


def _check_counts(record: RunRecord, plan: CampaignPlan, results: Sequence[BatchResult]) -> None:
    """Raise UsageError where a record says another thing than its batches."""
    from kvcheck.core.stress.campaign.tally import Tally

    tally = Tally(plan)
    for result in results:
        tally.add(result)
    said, counts = record.evidence, (tally.schedules, tally.traces)
    if (said.schedules, said.traces or 0) != counts:
        raise UsageError(
            f"run {record.run_id} contradicts itself: {said.schedules:,} schedules and {said.traces or 0:,} traces, "
            f"and its batches have {counts[0]:,} and {counts[1]:,}"
        )


def _check_apart(one: _Part, other: _Part) -> None:
    """Raise UsageError where two campaigns share a cell and a seed."""
    if one.plan is None or other.plan is None:
        return
    shared = {cell.cell for cell in one.plan.cells} & {cell.cell for cell in other.plan.cells}
    first = max(one.plan.seeds.first, other.plan.seeds.first)
    if shared and first <= min(one.plan.seeds.last, other.plan.seeds.last):
        ids = f"{one.records[0].run_id} and {other.records[0].run_id}"
        raise UsageError(
            f"runs {ids} are of different plans and both have {min(shared)} with seed {first}; expected each once"
        )


def _findings(parts: Sequence[_Part]) -> list[tuple[Finding, ...]]:
    return [found for part in parts for found in part.findings()]


def _session(ctx: typer.Context, records: Sequence[RunRecord], parts: Sequence[_Part]) -> Session:
    session = Session(
        argv=[*ctx.obj],
        repro=shlex.join(["kvcheck", *ctx.obj]),
        seed=records[0].seed,
        plan=_plan(records, parts),
        out=ctx.params["out"],
        teller=Terminal(is_quiet=ctx.params["format_name"] == "json"),
    )
    assert records[0].identity is not None, "check_each has looked"
    session.identity = records[0].identity
    if parts[0].tally is not None:
        tallies = [part.tally for part in parts if part.tally is not None]
        cost = {
            "batches": sum(each.batches for each in tallies),
            "cpu_s": round(sum(each.cpu_s for each in tallies), 1),
        }
        session.facts[FACTS] = cost
    session.warnings += dict.fromkeys(text for record in records for text in record.warnings)
    session.warnings += [part.missing for part in parts if part.missing is not None]
    return session


def _plan(records: Sequence[RunRecord], parts: Sequence[_Part]) -> Mapping[str, object]:
    """The plan of the merged record: the whole campaign's, where it is one and no shard is missing."""
    plan = {key: value for key, value in records[0].plan.items() if key not in (*LIMITS, *OF_CELLS)}
    if len(parts) == 1 and parts[0].plan is not None and parts[0].missing is None:
        return {**dict.fromkeys(("traces", "max_time_s")), **records[0].plan, "shard": None}
    for key in ("seeds", "answers_within", "shard", "workloads"):
        plan.pop(key, None)
    cells = dict.fromkeys(line for record in records for line in lines_of(record.plan))
    families: dict[str, object] = {}
    for record in records:
        if isinstance(found := record.plan.get("families"), dict):
            families |= found
    return {**plan, "cells": [*cells], "families": families, MERGED: [record.run_id for record in records]}


def _keep_ledger(session: Session, parts: Sequence[_Part]) -> None:
    """A whole campaign keeps its batches: it can be gone on with."""
    from kvcheck.core.stress.campaign.ledger import LEDGER, Ledger

    if len(parts) == 1 and parts[0].plan is not None and parts[0].missing is None:
        Ledger(session.folder / LEDGER).add(parts[0].results)
