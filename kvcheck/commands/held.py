"""CPU lines replayed on a device: operations unordered on the CPU are delayed there, and the rates are compared.

Invariants:
- CUDA and the user's own targets run in a process of their own. A new one takes the remaining runs after a lost
  context, and the next line after a death.
- Only wrong bytes under imposed delays reproduce a finding. All else is UNKNOWN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcheck.commands.own_target import OWN
from kvcheck.commands.targets import runner_of
from kvcheck.core.base.cells import kind_of
from kvcheck.core.base.errors import UnknownVerdict
from kvcheck.core.base.record import Verdict, value_from
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.run.plan import Plan

if TYPE_CHECKING:
    from kvcheck.core.run.workers import AskedProcess


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of one replayed line. agreed: runs with the result of the first one."""

    verdict: Verdict
    agreed: int
    told: list[str]

    def plain(self, plan: Plan | RoundPlan, times: int) -> dict[str, object]:
        row = {"line": plan.line(), "cell": plan.cell, "verdict": self.verdict.value}
        return {**row, "agreed": self.agreed, "times": times, "text": "\n".join(self.told).strip()}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldAnswer:
    """lost_after: the run of a plan of delays that lost the device, or None."""

    verdict: Verdict
    told: tuple[str, ...]
    lost_after: int | None = None


def replay_held(plans: Sequence[Plan], device: str, times: int, program: str) -> Iterator[Replayed]:
    """program: the worker for devices that can be lost."""
    if kind_of(device) != "cuda" and all(plan.own_target is None for plan in plans):
        for plan in plans:
            done = held(plan, device, times)
            yield Replayed(done.verdict, 1 if done.verdict is Verdict.FAIL else times, [*done.told])
        return
    from kvcheck.core.run.workers import AskedProcess

    with closing(AskedProcess(program, OWN)) as process:
        for plan in plans:
            yield _asked(process, plan, device, times)


def _asked(process: AskedProcess, plan: Plan, device: str, times: int) -> Replayed:
    heads: list[str] = []
    rates: list[str] = []
    left, verdict = times, Verdict.UNKNOWN
    while left > 0 and verdict is Verdict.UNKNOWN:
        answer = _answer(process, plan, device, left)
        head, *more = answer.told
        heads.append(head)
        rates += more
        left -= answer.lost_after or left
        verdict = answer.verdict
    is_shown = verdict is Verdict.FAIL
    return Replayed(verdict, 1 if is_shown else times, [heads[-1 if is_shown else 0], *rates])


def _answer(process: AskedProcess, plan: Plan, device: str, times: int) -> HeldAnswer:
    """Return the process's answer, and close the process if it can give no other."""
    from kvcheck.core.run.workers import Unanswered

    try:
        said = process.ask(["held", {"line": plan.line(), "device": device, "times": times}])
        assert isinstance(said, dict), "a row with the answer"
        answer: HeldAnswer = value_from(HeldAnswer, said["answer"], "answer")
    except (Unanswered, UnknownVerdict) as why:
        process.close()
        return HeldAnswer(verdict=Verdict.UNKNOWN, told=(f" UNKNOWN  {plan.cell}: {why}",))
    if answer.lost_after is not None:
        process.close()
    return answer


def held(plan: Plan, device: str, times: int) -> HeldAnswer:
    from kvcheck.core.stress.delayed import device_plans, tries, why_not

    head, runner = plan.cell, runner_of(plan)
    plans = device_plans(runner, plan, device)
    made = list(tries(runner, plans, times))
    told = [f"   {each.rates.text()}; {each.plan.choices}" for each in made]
    lost_after = made[-1].rates.free_runs if made and made[-1].lost is not None else None
    if made and made[-1].shown:
        told = [f" STILL FAILS  {head}: {made[-1].message}", *told, f"   next    kvcheck replay {made[-1].plan.line()}"]
        return HeldAnswer(verdict=Verdict.FAIL, told=tuple(told), lost_after=lost_after)
    told = [f" NOT REPRODUCED  {head}: {why_not(made)}", *told]
    return HeldAnswer(verdict=Verdict.UNKNOWN, told=tuple(told), lost_after=lost_after)
