"""`kvcheck stress --seeds A-B`: the schedules of many seeds, in batches that run in processes, shards or over Ray.

Invariants:
- Each ended batch is on disk before the next one is counted, and --resume does not repeat it.
- A finding ends its batch alone.
- The exit code is the record's: 0 pass, 1 finding, 4 not enough evidence, 130 interrupted.
- An earlier run of the same plan and code is continued, whatever its --max-time.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcheck.commands import worker
from kvcheck.commands.options import identity
from kvcheck.commands.probes import plan_facts
from kvcheck.commands.run_cells import CellRun, earlier_runs, not_gone_on_with, note, nothing_to_resume
from kvcheck.commands.stories import explain_findings
from kvcheck.commands.targets import unfound_mutant
from kvcheck.commands.terminal import cell_lines, complain
from kvcheck.core.base.errors import InternalError, KvcheckError, UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.seeds import parse_seeds, parse_shard
from kvcheck.core.run.plan import Plan
from kvcheck.core.run.session import Session

if TYPE_CHECKING:
    from kvcheck.core.stress.seeds.batches import SeedsPlan
    from kvcheck.core.stress.seeds.crew import Crew

SAVED_EVERY_S = 5.0
"""Seconds of wall time between two saves of run.json. The batches that ended in between are in the ledger."""
FACTS = "batches"
"""The key in the record's environment of how many batches ran, and their cost."""
LIMIT = "max_time_s"
"""The key of a plan that is a limit: it changes no result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ManySeeds:
    """Options of a run of many seeds. all: of all shards. own: of this one. ray: its address; None: here."""

    all: range
    own: range
    shard: str | None
    ray: str | None


def many_seeds(
    asked: CellRun, *, seeds: str | None, shard: str | None, ray: str | None, trace: str | None
) -> ManySeeds | None:
    """Return the options, or None for one seed. Raises UsageError."""
    if seeds is None:
        for name, value in (("--shard", shard), ("--ray", ray)):
            if value is not None:
                raise UsageError(f"{name} {value}: it is for a run of many seeds; expected --seeds A-B beside it")
        return None
    for name, given in (("--seed", asked.seed), ("--min-schedules", asked.min_schedules), ("--trace", trace)):
        if given is not None:
            raise UsageError(f"{name}: not for a run of many seeds; leave it out with --seeds")
    found = parse_seeds(seeds)
    return ManySeeds(all=found, own=parse_shard(shard, found), shard=shard, ray=ray)


def run_seeds(asked: CellRun, cells: Sequence[Plan], many: ManySeeds) -> int:
    plan = _plan(asked, cells, many)
    with closing(_crew(asked.jobs, many.ray)) as crew:
        run = _SeedsRun(asked, many, plan)
        if asked.resume:
            run.go_on(asked.out)
        run.print_head()
        interrupted = run.collect(crew, asked.limit(is_once=True, beside_s=0.0).until)
    run.conclude(asked.max_time, interrupted=interrupted)
    return asked.close(run.session, interrupted=interrupted)


def _plan(asked: CellRun, cells: Sequence[Plan], many: ManySeeds) -> SeedsPlan:
    from kvcheck.core.stress.seeds.batches import SeedsPlan

    if any(cell.on_device or not cell.is_in_process for cell in cells):
        raise UsageError("--seeds: expected schedules of one process on a CPU; leave --device and --transport out")
    if many.ray is not None and cells[0].own_target is not None:
        raise UsageError(f"--ray: its tasks run kvcheck's own target; leave --target {cells[0].target} out, or --ray")
    return SeedsPlan(
        cells=tuple(dataclasses.replace(cell, seed=many.all[0]) for cell in cells),
        seeds=many.own,
        schedules=asked.wanted(is_once=False) if asked.within is None else asked.schedules,
        within=asked.within,
    )


def _crew(jobs: int | None, ray: str | None) -> Crew:
    if ray is None:
        from kvcheck.core.stress.seeds.crew import Processes

        return Processes(jobs or Session.cpus(), worker.__name__)
    from kvcheck.core.stress.seeds.ray_crew import VARIABLES, RayCrew

    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)
    return RayCrew(ray, places=jobs, worker=worker.__name__)


class _SeedsRun:
    def __init__(self, asked: CellRun, many: ManySeeds, plan: SeedsPlan) -> None:
        from kvcheck.core.run.runners import row_of
        from kvcheck.core.stress.seeds.batches import LEDGER
        from kvcheck.core.stress.seeds.tally import Tally

        first = plan.cells[0]
        about = identity(own=first.own_target)
        self._seeds = f"{many.all[0]}-{many.all[-1]}"
        self.session = asked.session(
            drawn=first.seed,
            plan={
                LIMIT: asked.max_time,
                "seeds": self._seeds,
                "shard": many.shard,
                "schedules": plan.schedules,
                **({} if plan.within is None else {"answers_within": plan.within}),
                **plan_facts([*plan.cells]),
            },
            resumes=True,
            names_seed=False,
        )
        self.session.identity = about
        self.session.warnings += row_of(first).untried(first, plan.cells)
        self._ledger = self.session.folder / LEDGER
        self._plan, self._tally = plan, Tally(plan)
        self._done: frozenset[str] = frozenset()

    def go_on(self, out: Path) -> None:
        """Take over judged results of the newest run of the plan. Raises UsageError if there is none."""
        from kvcheck.core.stress.seeds.batches import append, read_ledger
        from kvcheck.core.stress.seeds.tally import Tally

        session, unlike = self.session, None
        for record in earlier_runs(session, out):
            if record.plan | {LIMIT: None} != session.plan | {LIMIT: None}:
                unlike = unlike or (None if record.complete else record)
                continue
            try:
                if other := not_gone_on_with(record, session):
                    raise UsageError(f"run {record.run_id} {other}")
                found, is_torn = read_ledger(out / record.run_id / self._ledger.name, self._plan)
            except UsageError as error:
                note(session, f"--resume skips a run: {error}")
                continue
            if is_torn:
                note(session, f"run {record.run_id}: the last line of its batches was cut off; that batch runs again")
            kept = [each for each in found if each.reason is None]
            append(self._ledger, kept)
            self._tally, self._done = Tally(self._plan, kept), frozenset(each.line for each in kept)
            session.say(f"resuming {record.run_id}: {counted(len(kept), 'batch')} done")
            return
        raise nothing_to_resume(session, out, unlike)

    def print_head(self) -> None:
        session, shard = self.session, self.session.plan["shard"]
        which = f"seeds {self._seeds}" + (f", shard {shard}" if shard else "")
        about = f"{counted(len(self._plan.cells), 'cell')}, {counted(self._tally.wanted, 'batch')}"
        session.say(f"kvcheck {session.version}  {which}  run {session.run_id}  {about}")
        session.say()

    def collect(self, crew: Crew, until: float | None) -> bool:
        """Run the remaining batches; True when interrupted. An error keeps the findings so far."""
        from kvcheck.core.stress.seeds.batches import append
        from kvcheck.core.stress.seeds.crew import results

        saved = time.monotonic()
        self._save()
        self.session.progress("starting")
        try:
            with self.session.ticking():
                for result in results(self._plan.tasks(self._done), crew, until=until):
                    append(self._ledger, [result])
                    if self._tally.add(result) or time.monotonic() >= saved + SAVED_EVERY_S:
                        self._save()
                        saved = time.monotonic()
                    found = counted(len(self.session.findings), "finding")
                    self.session.progress(f"{self._tally.work}, {self._tally.cpu_s:,.0f} CPU seconds, {found}")
        except KeyboardInterrupt:
            complain("interrupted: what was judged is kept")
            return True
        except KvcheckError as error:
            self._save()
            if not self.session.findings or isinstance(error, InternalError):
                raise
            complain(str(error))
            self.session.warnings.append(f"the run ended early: {error}")
        return False

    def conclude(self, max_time_s: float | None, *, interrupted: bool) -> None:
        from kvcheck.core.stress.seeds.batches import read_ledger
        from kvcheck.core.stress.seeds.tally import Tally

        session = self.session
        if interrupted and self._ledger.exists():  # it may have come between the write of a batch and its count
            self._tally = Tally(self._plan, read_ledger(self._ledger, self._plan)[0])
        tally, mutant = self._tally, self._plan.cells[0].mutant
        unfound = unfound_mutant(mutant, is_found=bool(tally.findings()))
        session.warnings += [*unfound, *sorted(tally.notes)]
        self._save(missing=next(iter(unfound), None))
        if not interrupted:
            explain_findings(session, max_time_s)
        for row in session.results:
            for line in cell_lines(row, session.findings):
                session.detail(line)
        session.say()
        session.say(f" {tally.work}, {tally.cpu_s:,.0f} CPU seconds of schedules")
        if tally.batches < tally.wanted and not interrupted:
            session.say(f" for the others, use a larger --max-time with --resume: {session.repro} --resume")

    def _save(self, missing: str | None = None) -> None:
        session, tally = self.session, self._tally
        session.findings, session.left_out = [], 0
        for of_batch in tally.findings():
            session.keep(of_batch)
        session.results = [*tally.rows(missing=missing)]
        session.facts[FACTS] = {"ended": tally.batches, "cpu_s": round(tally.cpu_s, 1)}
        session.save(complete=False)
