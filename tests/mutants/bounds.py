"""The workloads in which the mutants of late.py show within their bounds, and the explorations of these."""

from __future__ import annotations

from kvcheck.core.run.plan import ANSWERS, Plan
from kvcheck.core.run.turns import Exploration
from kvcheck.core.stress.targets.mutants import mutant

SEED = 1
WORKLOADS: dict[str, tuple[int, int]] = {
    "late-backup-loses-pins": (4, 18),
    "stuck-backup-loses-pins": (4, 18),
    "late-load-loses-pins": (1, 36),
    "asked-load-leaves-ring": (0, 12),
    "wait-looks-twice": (0, 9),
    "late-put-loses-pin": (1, 12),
    "retract-asks-for-save": (0, 3),
    "later-save-without-pins": (5, 3),
    "drain-waits-one-round": (4, 3),
}
"""By mutant, the schedule number and the requests of a small workload in which it shows."""


def exploration_of(name: str, *, within: int | None = None) -> Exploration:
    """All schedules of the mutant's workload within its bound, or within so many answers."""
    card, (schedule, requests) = mutant(name), WORKLOADS[name]
    first = Plan(
        scenario=card.scenario,
        shape=card.shape,
        strategy=ANSWERS,
        seed=SEED,
        schedule=schedule,
        requests=requests,
    )
    return Exploration(first, workloads=1, within=card.within if within is None else within)
