"""The decoder of a plan: the shapes it supports, and its form of the workload."""

from __future__ import annotations

import dataclasses

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.run.plan import ANSWERS, BUILTIN, Plan
from kvcheck.core.stress.scenarios.scenario import Load
from kvcheck.core.stress.workload import DECODERS, KNOWN_ANSWER, WORDS
from kvcheck.core.stress.workload.known_model import asked
from kvcheck.core.stress.workload.shapes import ANSWERING_SHAPES, MICRO_SHAPES, TINY_SHAPES

ONE_RANK = "1x1"


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
