"""`kvcheck merge`: one record, with one verdict, of several runs: shards, or runs of other seeds.

Invariants:
- If a shard is missing, all cells without a finding are UNKNOWN and name it.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from kvcheck.commands.asked import close
from kvcheck.commands.options import DEFAULT_OUT, Format, Out, Outputs, Reports
from kvcheck.commands.report import check_outputs, parse_outputs
from kvcheck.commands.terminal import Terminal
from kvcheck.core.base.cells import lines_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Evidence, RunRecord, read_record
from kvcheck.core.report.merging import LIMITS, OF_CELLS, OF_SEEDS, check_each, check_runs, merged_rows, missing_shards
from kvcheck.core.run.session import Session
from kvcheck.core.run.store import find_run

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
    outputs = parse_outputs(output, format_name)
    if len(runs) < 2:
        raise UsageError(f"merge: expected two or more runs, got {len(runs)}; kvcheck report shows one")
    records = [read_record(find_run(name, out)) for name in runs]
    check_each(records)
    if again := next((record for record in records if MERGED in record.plan), None):
        raise UsageError(f"run {again.run_id} was merged; name the runs that it was made from: {again.plan[MERGED]}")
    check_runs(records)
    check_outputs(outputs)
    session = _session(ctx, records)
    session.say(f"kvcheck {session.version}  merge  run {session.run_id}  {counted(len(records), 'run')}")
    session.say()
    return close(session, outputs, reports=reports, interrupted=False)


def _session(ctx: typer.Context, records: Sequence[RunRecord]) -> Session:
    plans = [record.plan for record in records]
    session = Session(
        argv=[*ctx.obj],
        repro=shlex.join(["kvcheck", *ctx.obj]),
        seed=records[0].seed,
        plan={**_plan(plans), MERGED: [record.run_id for record in records]},
        out=ctx.params["out"],
        teller=Terminal(is_quiet=ctx.params["format_name"] == "json"),
    )
    assert records[0].identity is not None, "check_each has looked"
    session.identity = records[0].identity
    missing = missing_shards(plans)
    texts = [text for record in records for text in record.warnings]
    session.warnings += dict.fromkeys([*texts, *([missing] if missing else [])])
    for record in records:
        session.keep(record.findings)
    session.results = [*merged_rows([(each.run_id, each.scenarios) for each in records], _gap_of(records), missing)]
    return session


def _plan(plans: Sequence[dict[str, object]]) -> Mapping[str, object]:
    left_out = (*LIMITS, *OF_CELLS, *OF_SEEDS)
    families = [found for plan in plans if isinstance(found := plan.get("families"), dict)]
    return {
        **{key: value for key, value in plans[0].items() if key not in left_out},
        "cells": [*dict.fromkeys(line for plan in plans for line in lines_of(plan))],
        "families": {shape: family for found in families for shape, family in found.items()},
    }


def _gap_of(records: Sequence[RunRecord]) -> Callable[[str, Evidence], str | None]:
    from kvcheck.core.run.plan import parse_line
    from kvcheck.core.stress.runner import evidence_gap

    plans = [parse_line(line) for record in records for line in lines_of(record.plan)]
    cells = {plan.cell: plan for plan in plans if plan.probe is None}
    return lambda cell, evidence: evidence_gap(cells[cell], evidence) if cell in cells else None
