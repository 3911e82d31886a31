"""Runners: which of the four runs a plan's schedules, and all that depends on it; chosen by the plan's kind.

Invariants:
- RUNNERS is the only place that says how kinds of plans differ.
- A runner keeps what the schedules of its cells share, such as the workload; it never looks at a clock.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.transfer.mooncake.library import require_library
from kvcheck.core.stress.cost import schedule_cost
from kvcheck.core.stress.delay_lines import parse_delays
from kvcheck.core.stress.delayed import DelayRunner
from kvcheck.core.stress.pair import parse_pair
from kvcheck.core.stress.probe_runner import ProbeRunner, check_probe_plan, probe_cells, probe_of, untried_by_probes
from kvcheck.core.stress.ranks.runner import RankRunner
from kvcheck.core.stress.runner import Runner, ScheduleRunner
from kvcheck.core.stress.scenarios import SCENARIOS
from kvcheck.core.stress.schedule import Kind, Plan
from kvcheck.core.stress.strategies import decode_choices, order_of
from kvcheck.core.targets.target import Target
from kvcheck.core.workload.shapes import TINY_SHAPES
from kvcheck.core.workload.shapes import shape as shape_named

FLOOR = 3
"""The portfolio's first three are eager, lazy and one delay; by then ranks and settings have changed too."""
PROBE_FLOOR = 12
"""prefixes.swa of SGLang 0.5.10.post1 failed in the sixth schedule of a seed, and passed with two."""


TargetOf = Callable[[Plan], Target]
"""What a plan has under test, fixed or broken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerRow:
    """How plans of one kind are checked, run and counted.

    make: the runner of one cell. check_names: that scenario and shape, or the probe, exist. check: that nothing is
    named that it does not read, and that it has what it needs. cells: the plans of a run, from one without scenario
    and shape. floor: schedules without which a cell is no pass. order: what order a plan tries. left_out: orders that
    it does not. cost: of a schedule, in words. shows: what a cell is about. untried: what no cell of a run exercises.

    confirms: what was left unordered can be run in the other order. is_once: one schedule is what was asked for.
    is_alone: cells do not run beside one another. is_shared: one runner, that was started before, runs all cells.
    tells_notes: its notes are for the terminal too. opens_device: this process works on the plan's device.
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
    """The row of what runs a plan."""
    return RUNNERS[plan.kind]


def _check_names(plan: Plan) -> None:
    SCENARIOS.require(plan.scenario)
    shape_named(plan.shape)


def _check_choices(plan: Plan) -> None:
    """Choices that nothing would read are refused: the line says another schedule than it seems to."""
    readers = {"replay": decode_choices, "flip": parse_pair}
    if plan.strategy not in readers:
        if plan.choices is not None:
            raise UsageError(
                f"choices: expected strategy=replay or flip beside them, got strategy={plan.strategy}; "
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
    """What real processes cannot do is refused; a library that is missing is UNKNOWN before anything starts."""
    strategy = None if plan.trace is not None else plan.strategy
    for name, value, able in (
        ("--backend", plan.backend, "eager"),
        ("--mutant", plan.mutant, None),
        ("--strategy", strategy or "portfolio", "portfolio"),
    ):
        if value != able:
            raise UsageError(f"{name} {value}: --transport {plan.transport} runs real processes, in no chosen order")
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
        for name in dict.fromkeys(shapes or TINY_SHAPES)
        if shape_named(name).family in SCENARIOS.load(scenario).families
    ]
    if not cells:
        raise UsageError(
            f"{', '.join(scenarios)} does not apply to {', '.join(shapes)}; kvcheck list scenarios says what each needs"
        )
    return cells


def _for_scenario(plan: Plan) -> Plan:
    """The plan of one cell. Raises UsageError where its scenario has no ranks, or none in other processes."""
    if "pd-transfer" in SCENARIOS.load(plan.scenario).needs:
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
    of_backend = {"eager": "eager", "cuda": "the device's order"}
    return of_backend.get(plan.backend) or order_of(plan.strategy, plan.schedule)


def _left_out(plan: Plan) -> tuple[str, ...]:
    """Orders that a plan leaves out by its strategy or backend."""
    if plan.backend == "eager":
        return ("lazy", "delays", "random")
    others = {"eager": ("lazy", "delays", "random"), "lazy": ("eager", "delays", "random")}
    others |= {"random": ("eager", "lazy", "delays"), "delay": ("eager", "lazy", "random")}
    return others.get(plan.strategy, ()) if plan.backend == "simulated" else ()


SCHEDULE = RunnerRow(
    make=lambda plan, target_of: ScheduleRunner(target_of(plan)),
    check_names=_check_names,
    check=_check_choices,
    cells=_cells,
    floor=FLOOR,
    order=_order,
    left_out=_left_out,
    confirms=True,
)
RUNNERS: Mapping[Kind, RunnerRow] = {
    Kind.SCHEDULE: SCHEDULE,
    Kind.DELAYED: dataclasses.replace(
        SCHEDULE,
        make=lambda plan, target_of: DelayRunner(ScheduleRunner(target_of(plan)), plan),
        check=_check_delays,
        order=lambda plan: order_of(plan.strategy, plan.schedule),
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
        confirms=False,
        is_once=True,
        is_alone=True,
        tells_notes=True,
    ),
    Kind.PROBE: RunnerRow(
        make=lambda plan, target_of: ProbeRunner(plan.target, device=plan.device),
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
