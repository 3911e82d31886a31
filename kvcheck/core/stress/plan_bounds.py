"""The bounds of a plan: the most pages of a request, and the kinds of faults."""

from __future__ import annotations

import dataclasses

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.scenario import FAULTS, Load
from kvcheck.core.stress.workload import WORDS
from kvcheck.core.stress.workload.jobs import Job, leading_runs

MOST_PAGES = 1000
NO_FAULTS = "none"


def check_bounds(plan: Plan) -> None:
    """Raise UsageError for bounds without meaning, or beside options that they cannot bound."""
    if plan.pages is None and plan.faults is None:
        return
    name = "pages" if plan.pages is not None else "faults"
    if not plan.is_in_process or plan.on_device or plan.trace is not None or plan.decoder != WORDS:
        raise UsageError(
            f"{name}: expected a line of one process on a CPU, without a trace and with decoder {WORDS}; leave it out"
        )
    if plan.pages is not None and not 1 <= plan.pages <= MOST_PAGES:
        raise UsageError(f"pages: expected 1 to {MOST_PAGES}, got {plan.pages}")
    if plan.faults is not None:
        faults_of(plan.faults)


def faults_of(text: str) -> frozenset[str]:
    """Parse the kinds of faults that a line leaves in. Raises UsageError."""
    names = () if text == NO_FAULTS else tuple(text.split("."))
    if len(set(names)) < len(names) or not set(names) <= set(FAULTS):
        raise UsageError(
            f"faults: expected some of {', '.join(FAULTS)} with a dot between two, or {NO_FAULTS!r}; got {text[:40]!r}"
        )
    return frozenset(names)


def faults_text(kinds: frozenset[str]) -> str:
    return ".".join(each for each in FAULTS if each in kinds) or NO_FAULTS


def bounded(load: Load, plan: Plan, shape: ModelShape) -> Load:
    if plan.pages is None:
        return load
    most = plan.pages * shape.page_size
    jobs = {job.request: _short(job, most) for job in load.jobs}
    return dataclasses.replace(
        load,
        jobs=tuple(jobs.values()),
        capacity_tokens=min(load.capacity_tokens, most + shape.page_size),
        rivals=tuple(_short_rival(each, jobs, shape.page_size) for each in load.rivals),
    )


def pages_of(load: Load, shape: ModelShape) -> int:
    """The most pages of one request. The last token of an output is never written."""
    return max(-(-(job.total_tokens - 1) // shape.page_size) for job in load.jobs)


def _short(job: Job, most: int) -> Job:
    """Cut the output first; its last token is never written."""
    prompt = min(job.prompt_tokens, most)
    return dataclasses.replace(
        job,
        prompt_tokens=prompt,
        output_tokens=min(job.output_tokens, most - prompt + 1),
        blocks=tuple(leading_runs(job.blocks, prompt)),
    )


def _short_rival(rival: Rival, jobs: dict[int, Job], page: int) -> Rival:
    job, whole = jobs[rival.job.request], jobs[rival.of].prompt_tokens // page
    return dataclasses.replace(
        rival, job=job, chain=rival.chain[:whole], shared=min(rival.shared, whole, (job.prompt_tokens - 1) // page)
    )
