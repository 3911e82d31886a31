"""The scenario of a plan, with the ranks that it names if they suit its shape; and its variant."""

from __future__ import annotations

import dataclasses
from zlib import crc32

from kvcheck.core.base.errors import LayoutMismatch, UsageError
from kvcheck.core.cache.pools.shape import ModelShape, rank_shape
from kvcheck.core.run.plan import ANSWERS, BUILTIN, FLOOR, PROCESS_RANKS, Plan, parse_ranks
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.scenarios.pd_transfer import PDTransfer
from kvcheck.core.stress.scenarios.rivals import Rival
from kvcheck.core.stress.scenarios.scenario import FAULTS, Load, Scenario
from kvcheck.core.stress.scenarios.variants import STRIDE
from kvcheck.core.stress.workload import DECODERS, KNOWN_ANSWER, WORDS
from kvcheck.core.stress.workload.jobs import Job, leading_runs
from kvcheck.core.stress.workload.known_model import asked
from kvcheck.core.stress.workload.shapes import ANSWERING_SHAPES, MICRO_SHAPES, TINY_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named

ONE_RANK = "1x1"
MOST_PAGES = 1000
NO_FAULTS = "none"


def scenario_of(plan: Plan) -> Scenario:
    scenario = SCENARIOS.load(plan.scenario)()
    if plan.ranks is None and not (plan.has_rank_processes and isinstance(scenario, PDTransfer)):
        return scenario
    if not isinstance(scenario, PDTransfer):
        raise UsageError(f"--ranks {plan.ranks}: {plan.scenario} runs 1x1 only; pd-transfer and nvlink-aux take ranks")
    scenario.ranks = parse_ranks(plan.ranks or PROCESS_RANKS)
    _check_heads(plan, scenario.ranks)
    return scenario


def variant_of(plan: Plan) -> int:
    """The number of the variant that a plan runs: the next cell's is the next one, and so is the next seed's.

    The first schedules of all cells have the first variants, which bring the most pairs of settings.
    """
    return (plan.schedule + FLOOR * (plan.seed - 1)) * STRIDE + _place(plan)


def turn_of(plan: Plan) -> int:
    return _place(plan) + plan.seed + crc32(plan.scenario.encode())


def _place(plan: Plan) -> int:
    return TINY_SHAPES.index(plan.shape) if plan.shape in TINY_SHAPES else crc32(plan.shape.encode())


def _check_heads(plan: Plan, ranks: tuple[int, int]) -> None:
    for size in ranks:
        try:
            rank_shape(shape_named(plan.shape), 0, size)
        except LayoutMismatch as error:
            raise UsageError(f"--ranks {plan.ranks}: {plan.shape} cannot be dealt out to them: {error}") from error


def check_decoder(plan: Plan) -> None:
    """Raise UsageError for an unknown decoder, or one that the plan's runner does not use."""
    DECODERS.require(plan.decoder)
    if plan.decoder == WORDS:
        return
    if not plan.is_in_process or plan.on_device:
        option, given, able = _unable(plan)
        raise UsageError(
            f"--decoder {plan.decoder}: it reads pools in host memory, in one process; expected {option} {able}, got "
            f"{given}; next: the same without {option}"
        )
    if plan.ranks not in (None, ONE_RANK):
        raise UsageError(f"--decoder {plan.decoder}: a rank has all heads; expected --ranks {ONE_RANK}")


def _unable(plan: Plan) -> tuple[str, str, str]:
    if plan.probe is not None:
        return "--target", plan.target, BUILTIN
    if plan.has_rank_processes:
        return "--transport", plan.transport, "loopback"
    return "--device", plan.device, "cpu"


def check_decoded(plan: Plan) -> None:
    check_decoder(plan)
    if plan.decoder != WORDS and plan.shape not in ANSWERING_SHAPES:
        raise UsageError(
            f"--decoder {plan.decoder}: expected a shape of {', '.join(ANSWERING_SHAPES)}; got {plan.shape}"
        )


def usual_shapes(plan: Plan) -> tuple[str, ...]:
    """Both sizes for schedules; the smaller one for answers, which are fewer then."""
    if plan.decoder != WORDS:
        return ANSWERING_SHAPES
    if not plan.is_in_process or plan.backend != "simulated" or plan.trace is not None:
        return TINY_SHAPES
    return MICRO_SHAPES if plan.strategy == ANSWERS else (*MICRO_SHAPES, *TINY_SHAPES)


def decoded(load: Load, plan: Plan, shape: ModelShape) -> Load:
    if plan.decoder != KNOWN_ANSWER:
        return load
    return dataclasses.replace(load, jobs=tuple(asked(job, shape) for job in load.jobs), decoder=plan.decoder)


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
