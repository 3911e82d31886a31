"""RUNNERS: the table of the four runners. A plan's kind chooses its row, which holds all differences between kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.devices import number_of
from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.cuda import CudaDevice
from kvcheck.core.cache.backend.probe import probe
from kvcheck.core.cache.transfer import SHARING_TRANSPORTS
from kvcheck.core.cache.transfer.mooncake.library import require_library
from kvcheck.core.stress.answers import parse_answers
from kvcheck.core.stress.cost import schedule_cost
from kvcheck.core.stress.delay_lines import parse_delays
from kvcheck.core.stress.delayed import DelayRunner
from kvcheck.core.stress.orders import order_of
from kvcheck.core.stress.pair import parse_pair
from kvcheck.core.stress.plan_decoder import ONE_RANK, check_decoded, usual_shapes
from kvcheck.core.stress.plan_scenario import scenario_of
from kvcheck.core.stress.probe_runner import ProbeRunner, check_probe_plan, probe_cells, probe_of, untried_by_probes
from kvcheck.core.stress.ranks.runner import RankRunner
from kvcheck.core.stress.runner import Runner, ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.schedule import ANSWERS, FLOOR, NO_EXTRAS, Kind, Plan
from kvcheck.core.stress.strategies import decode_choices
from kvcheck.core.stress.targets.target import Target
from kvcheck.core.stress.workload import WORDS
from kvcheck.core.stress.workload.shapes import shape as shape_named

PROBE_FLOOR = 12
"""prefixes.swa of SGLang 0.5.10.post1 failed in the sixth schedule of a seed, and passed with two."""


TargetOf = Callable[[Plan], Target]
"""The target of a plan, fixed or broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRow:
    """How plans of one kind are checked, run and counted.

    check_names: checks that scenario and shape, or the probe, exist. check: refuses options that the runner ignores,
    and an incomplete plan. cells: the plans of a run, from one without scenario and shape. floor: schedules that a pass
    needs. left_out: orders that a plan does not try. shows: the subject of a cell. untried: lines on all that no cell
    of a run exercises.

    confirms: unordered operations can be run in the other order too. is_alone: cells never run at the same time.
    is_shared: one runner, started before, runs all cells. opens_device: this process works on the plan's device.
    """

    make: Callable[[Plan, TargetOf], Runner]
    check_names: Callable[[Plan], object]
    check: Callable[[Plan], None]
    cells: Callable[[Plan, Sequence[str], Sequence[str]], list[Plan]]
    floor: int
    order: Callable[[Plan], str | None]
    left_out: Callable[[Plan], tuple[str, ...]]
    cost: Callable[[Plan], str] = schedule_cost
    shows: Callable[[Plan], str | None] = lambda plan: None
    untried: Callable[[Plan, Sequence[Plan]], list[str]] = lambda base, plans: []
    confirms: bool = False
    is_once: bool = False
    is_alone: bool = False
    is_shared: bool = False
    tells_notes: bool = False
    opens_device: bool = True


def row_of(plan: Plan) -> RunnerRow:
    return RUNNERS[plan.kind]


def _check_names(plan: Plan) -> None:
    SCENARIOS.require(plan.scenario)
    shape_named(plan.shape)
    check_decoded(plan)


def _check_choices(plan: Plan) -> None:
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


def _check_delays(plan: Plan) -> None:
    if plan.choices is not None:
        parse_delays(plan.choices)


def _check_ranks(plan: Plan) -> None:
    """A missing library is UNKNOWN before any process starts."""
    strategy = None if plan.trace is not None else plan.strategy
    for name, value, able in (
        ("--backend", plan.backend, "eager"),
        ("--mutant", plan.mutant, None),
        ("--strategy", strategy or "portfolio", "portfolio"),
    ):
        if value != able:
            raise UsageError(f"{name} {value}: --transport {plan.transport} runs real processes, in no chosen order")
    if plan.device == "threads":
        raise UsageError(
            f"--device threads: --transport {plan.transport} runs ranks as processes; leave one of them out"
        )
    if plan.device != "cpu" and plan.transport not in SHARING_TRANSPORTS:
        able = " or ".join(SHARING_TRANSPORTS)
        raise UsageError(
            f"--device {plan.device}: the ranks of --transport {plan.transport} have host memory alone; expected "
            f"--device cpu, or --transport {able}"
        )
    if plan.transport == "mooncake":
        require_library()
    _check_choices(plan)


def _cells(base: Plan, scenarios: Sequence[str], shapes: Sequence[str]) -> list[Plan]:
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
            f"{', '.join(scenarios)} does not apply to {', '.join(shapes)}; kvcheck list scenarios says what each needs"
        )
    return cells


def _for_scenario(plan: Plan) -> Plan:
    """Raises UsageError if the scenario has no ranks, or cannot run them as processes, or if its decoder cannot decode
    it."""
    check_decoded(plan)
    if "pd-transfer" in SCENARIOS.load(plan.scenario).needs:
        plan = plan if plan.decoder == WORDS else dataclasses.replace(plan, ranks=ONE_RANK)
        scenario_of(plan)  # refuses ranks that do not suit the shape
        return plan
    able = " or ".join(name for name in SCENARIOS.names() if "pd-transfer" in SCENARIOS.load(name).needs)
    if plan.kind is Kind.RANKS:
        raise UsageError(
            f"--transport {plan.transport}: {plan.scenario} runs in one process, over loopback; name {able}"
        )
    if plan.ranks not in (None, "1x1"):
        raise UsageError(f"--ranks {plan.ranks}: {plan.scenario} runs 1x1 only; name {able}")
    return dataclasses.replace(plan, ranks=None)


def _order(plan: Plan) -> str:
    of_backend = {"eager": "eager", "cuda": "the device's order", "threads": "the threads' order"}
    return of_backend.get(plan.backend) or order_of(plan)


def _left_out(plan: Plan) -> tuple[str, ...]:
    own = {"eager": "eager", "lazy": "lazy", "random": "random", "delay": "delays", ANSWERS: ANSWERS}
    chosen = "eager" if plan.backend == "eager" else own.get(plan.strategy) if plan.backend == "simulated" else None
    return () if chosen is None else tuple(name for name in own.values() if name != chosen)


def _untried(base: Plan, plans: Sequence[Plan]) -> list[str]:
    lines = []
    if base.own_target is not None:
        lines.append(f"not tried: ranks of {base.own_target} as processes")
    if base.backend == "threads":
        lines.append("not tried: a GPU, its queues, copy engines and caches; next, where there is one: --device cuda")
    return lines


def _untried_by_ranks(base: Plan, plans: Sequence[Plan]) -> list[str]:
    if base.transport not in SHARING_TRANSPORTS or base.device != "cpu":
        return []
    return [
        "not tried: copies of a device, and NVLink: on a host, bytes land in the order in which its CPU stores them; "
        f"next, where there is a GPU: kvcheck stress nvlink-aux --transport {base.transport} --device cuda"
    ]


def _untried_by_delays(base: Plan, plans: Sequence[Plan]) -> list[str]:
    """Orders that a hold cannot impose, because streams of the device share a queue."""
    if base.backend != "cuda":
        return _untried(base, plans)
    found = probe(CudaDevice(number_of(base.device)))
    shared = [f"not tried: orders of lanes that share a queue of the device; {found.text}"] if found.behind else []
    return [*_untried(base, plans), *shared]


SCHEDULE = RunnerRow(
    make=lambda plan, target_of: ScheduleRunner(target_of(plan)),
    check_names=_check_names,
    check=_check_choices,
    cells=_cells,
    floor=FLOOR,
    order=_order,
    left_out=_left_out,
    untried=_untried,
    confirms=True,
)
RUNNERS: Mapping[Kind, RunnerRow] = {
    Kind.SCHEDULE: SCHEDULE,
    Kind.DELAYED: dataclasses.replace(
        SCHEDULE,
        make=lambda plan, target_of: DelayRunner(ScheduleRunner(target_of(plan)), plan),
        check=_check_delays,
        order=lambda plan: order_of(plan),
        untried=_untried_by_delays,
        confirms=False,
        tells_notes=True,
    ),
    Kind.RANKS: dataclasses.replace(
        SCHEDULE,
        make=lambda plan, target_of: RankRunner(),
        check=_check_ranks,
        floor=1,
        order=lambda plan: "the machine's order",
        left_out=lambda plan: ("chosen orders",),
        untried=_untried_by_ranks,
        confirms=False,
        is_once=True,
        is_alone=True,
        tells_notes=True,
    ),
    Kind.PROBE: RunnerRow(
        make=lambda plan, target_of: ProbeRunner(plan.target, device=plan.device, variables=plan.engine_variables),
        check_names=probe_of,
        check=check_probe_plan,
        cells=probe_cells,
        floor=PROBE_FLOOR,
        order=lambda plan: None,
        left_out=lambda plan: (),
        cost=lambda plan: "the engine had not answered",
        shows=lambda plan: probe_of(plan)[0].shows,
        untried=untried_by_probes,
        is_alone=True,
        is_shared=True,
        opens_device=False,
    ),
}
