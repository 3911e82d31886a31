"""The rows of RUNNERS for kvcheck's own cache and for a user's own engine in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

from kvcheck.core.base.cells import number_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.record import Coverage, Finding
from kvcheck.core.cache.backend.cuda import CudaDevice
from kvcheck.core.cache.backend.probe import probe
from kvcheck.core.cache.pools import POOLS
from kvcheck.core.cache.pools.buffers import Granularity
from kvcheck.core.cache.pools.shape import ModelShape
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS
from kvcheck.core.run.outcome import Outcome, Runner, TargetOf
from kvcheck.core.run.plan import ANSWERS, FLOOR, NO_EXTRAS, Plan
from kvcheck.core.run.runners import RunnerRow
from kvcheck.core.run.turns import parse_answers
from kvcheck.core.stress.audit import AUDIT, is_audited
from kvcheck.core.stress.delay_lines import parse_delays
from kvcheck.core.stress.delayed import DelayRunner
from kvcheck.core.stress.flip import confirmed
from kvcheck.core.stress.orders import order_of
from kvcheck.core.stress.plan_scenario import ONE_RANK, check_decoded, scenario_of, usual_shapes, variant_of
from kvcheck.core.stress.runner import ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.strategies import DELAYS, decode_choices, delay_name, parse_pair
from kvcheck.core.stress.targets.target import Target
from kvcheck.core.stress.workload import WORDS
from kvcheck.core.stress.workload.shapes import MICRO_SHAPES
from kvcheck.core.stress.workload.shapes import shape as shape_named

NOT_FOR_PROCESSES = ("retry delay",)
"""Kinds of settings that ranks in processes do not go through."""
PATHS = ("metadata path",)
"""Those that only processes which share memory go through."""
ORDERS = ("eager", "lazy", "random", ANSWERS, *map(delay_name, DELAYS))


class ScheduleRow(RunnerRow):
    floor = FLOOR
    confirms = True
    opens_device = True

    def takes(self, plan: Plan) -> bool:
        return plan.is_in_process and not plan.is_delayed

    def make(self, plan: Plan, target_of: TargetOf) -> Runner:
        return _in_process(plan, target_of)

    def check_names(self, plan: Plan) -> None:
        SCENARIOS.require(plan.scenario)
        shape_named(plan.shape)
        check_decoded(plan)

    def check(self, plan: Plan) -> None:
        check_choices(plan)

    def cells(self, base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
        for name in scenarios:
            SCENARIOS.require(name)
        for name in shapes:
            shape_named(name)
        cells = [
            _for_scenario(dataclasses.replace(base, scenario=scenario, shape=name))
            for scenario in dict.fromkeys(scenarios or SCENARIOS.names())
            for name in dict.fromkeys(shapes or usual_shapes(base))
            if shape_named(name).family in SCENARIOS.load(scenario).families
        ]
        if not cells:
            raise UsageError(
                f"{', '.join(scenarios)} does not apply to {', '.join(shapes)}; kvcheck list scenarios says what each "
                "needs"
            )
        return cells

    def tried(self, plan: Plan) -> tuple[str, ...]:
        return (self.order(plan), *settings_tried_by(plan), *((AUDIT,) if is_audited(plan) else ()))

    def order(self, plan: Plan) -> str:
        of_backend = {"eager": "eager", "cuda": "the device's order", "threads": "the threads' order"}
        return of_backend.get(plan.backend) or order_of(plan)

    def settings(self, plan: Plan) -> tuple[str, ...]:
        return tuple(name for name in scenario_of(plan).table.names if _has_effect(plan, name))

    def left_out(self, plan: Plan) -> tuple[str, ...]:
        own = {"eager": "eager", "lazy": "lazy", "random": "random", "delay": "delays", ANSWERS: ANSWERS}
        chosen = "eager" if plan.backend == "eager" else own.get(plan.strategy) if plan.backend == "simulated" else None
        return () if chosen is None else tuple(name for name in own.values() if name != chosen)

    def lacks(self, plan: Plan, found: Coverage) -> str | None:
        is_portfolio = plan.strategy == "portfolio" and plan.backend == "simulated"
        is_eager = is_portfolio and {*found.tried} & {*ORDERS} == {"eager"}
        return "none of them was lazy or delayed" if is_eager else None

    def is_small(self, plan: Plan) -> bool:
        return plan.shape in MICRO_SHAPES

    def cost(self, plan: Plan) -> str:
        return schedule_cost(plan)

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        lines = []
        if base.own_target is not None:
            lines.append(f"not tried: ranks of {base.own_target} as processes")
        if base.backend == "threads":
            lines.append(
                "not tried: a GPU, its queues, copy engines and caches; next, where there is one: --device cuda"
            )
        return lines

    def confirmed(self, runner: Runner, outcome: Outcome, may_go_on: Callable[[], bool]) -> tuple[Finding, ...]:
        return confirmed(runner, outcome, may_go_on)


class DelayedRow(ScheduleRow):
    confirms = False
    tells_notes = True

    def takes(self, plan: Plan) -> bool:
        return plan.is_delayed

    def make(self, plan: Plan, target_of: TargetOf) -> Runner:
        return DelayRunner(_in_process(plan, target_of), plan)

    def check(self, plan: Plan) -> None:
        if plan.choices is not None:
            parse_delays(plan.choices)

    def order(self, plan: Plan) -> str:
        return order_of(plan)

    def untried(self, base: Plan, plans: Sequence[Plan]) -> list[str]:
        lines = super().untried(base, plans)
        if base.backend == "cuda" and (found := probe(CudaDevice(number_of(base.device)))).behind:
            lines.append(f"not tried: orders of lanes that share a queue of the device; {found.text}")
        return lines


SCHEDULE = ScheduleRow()
DELAYED = DelayedRow()


def _in_process(plan: Plan, target_of: TargetOf) -> ScheduleRunner:
    return ScheduleRunner(cast(Target, target_of(plan)))  # a run knows no targets; these rows have no other


def check_choices(plan: Plan) -> None:
    """Refuse choices that no strategy reads: the line would name another schedule than it seems to."""
    if plan.extras is not None and (plan.extras != NO_EXTRAS or plan.strategy != ANSWERS):
        raise UsageError(f"extras: expected {NO_EXTRAS}, beside strategy={ANSWERS}; got {plan.extras}")
    readers = {"replay": decode_choices, "flip": parse_pair, ANSWERS: parse_answers}
    if plan.strategy == ANSWERS and plan.backend != "simulated":
        raise UsageError(f"--strategy answers: expected --backend simulated, which alone has it; got {plan.backend}")
    if plan.strategy == ANSWERS and plan.choices is None:
        return
    if plan.strategy not in readers:
        if plan.choices is not None:
            raise UsageError(
                f"choices: expected strategy=replay, flip or answers beside them, got strategy={plan.strategy}; "
                "delay takes them on a device alone"
            )
        return
    if plan.choices is None:
        raise UsageError(f"strategy={plan.strategy}: expected choices=..., got none; copy the whole line")
    if plan.backend != "simulated":
        raise UsageError(f"choices: expected backend=simulated, which alone takes them, got backend={plan.backend}")
    readers[plan.strategy](plan.choices)


def _for_scenario(plan: Plan) -> Plan:
    """The plan of one cell. Raises UsageError if its scenario has no ranks, or cannot run them as processes, or if its
    decoder cannot decode it."""
    check_decoded(plan)
    if "pd-transfer" in SCENARIOS.load(plan.scenario).needs:
        plan = plan if plan.decoder == WORDS else dataclasses.replace(plan, ranks=ONE_RANK)
        scenario_of(plan)  # refuses ranks that do not suit the shape
        return plan
    able = " or ".join(name for name in SCENARIOS.names() if "pd-transfer" in SCENARIOS.load(name).needs)
    if plan.has_rank_processes:
        raise UsageError(
            f"--transport {plan.transport}: {plan.scenario} runs in one process, over loopback; name {able}"
        )
    if plan.ranks not in (None, "1x1"):
        raise UsageError(f"--ranks {plan.ranks}: {plan.scenario} runs 1x1 only; name {able}")
    return dataclasses.replace(plan, ranks=None)


def settings_tried_by(plan: Plan) -> tuple[str, ...]:
    return tuple(name for name in scenario_of(plan).table.variant(variant_of(plan)).names if _has_effect(plan, name))


def _has_effect(plan: Plan, setting: str) -> bool:
    """Processes send nothing again, and metadata in one way unless they share memory."""
    if not plan.has_rank_processes:
        return True
    lacking = NOT_FOR_PROCESSES if plan.transport in SHARING_TRANSPORTS else NOT_FOR_PROCESSES + PATHS
    return setting.partition(":")[0] not in lacking


def schedule_cost(plan: Plan) -> str:
    shape = shape_named(plan.shape)
    requests = "the requests of the trace" if plan.trace is not None else "its requests"
    if plan.requests is not None:
        requests = f"{plan.requests:,} requests"
    return (
        f"{requests}, {token_bytes(shape):,} bytes of KV a token; next: a smaller --shape, fewer --requests or a "
        "larger --max-time"
    )


def token_bytes(shape: ModelShape) -> int:
    """Bytes of one token in all layers of the device pool, without states."""
    total = 0
    for space in POOLS.load(shape.family)(shape):
        for buffer in space.buffers:
            if buffer.rows is Granularity.TOKEN:
                total += len(space.layers) * buffer.row_bytes
            elif buffer.rows is Granularity.PAGE:
                total += len(space.layers) * buffer.row_bytes // shape.page_size
    return total
