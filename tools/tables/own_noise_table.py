"""How often two equal servers are accused, and how often one stale page in 50 requests is missed, by simulation.

    python -m tools.tables.own_noise_table [--runs 4000]

Each row is a kind of noise; each run draws the deviations that the arms of one round would have, and asks
`statistic.judge` as a run does, with suspects asked again. Noise that a page keeps is the worst case: what a treated
request read was written once, and each repeat reads the same. A planted page adds so many nats to one treated request.

Invariants:
- Everything is drawn from the seed of a row and the number of a run; nothing is tuned to a row.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass

from kvcheck.core.live.own.statistic import (
    GIVE_UP,
    MORE_CONTROLS,
    MOST_SUSPECTS,
    REPEATS,
    Level,
    Measured,
    Repeats,
    is_wide,
    judge,
    needs_more,
    settled,
)
from tools.gate_trials import most_share

REQUESTS = 50
STALE = (1.0, 2.0, 4.0)
"""Nats by which a stale page moves an answer."""

Draw = Callable[[random.Random], float]


@dataclass(frozen=True)
class Noise:
    """batch: of the load and of pages that it writes. again: of asking alone. scale: of one request. kept: it lies in a
    page that the treated request read, and comes again with it. shared: treated requests that read one such page."""

    name: str
    batch: Callable[[random.Random, float], float]
    again: Callable[[random.Random, float], float]
    scale: Draw = lambda rng: 1.0
    kept: bool = True
    shared: int = 1


def normal(nats: float) -> Callable[[random.Random, float], float]:
    return lambda rng, scale: abs(rng.gauss(0.0, nats * scale))


def pareto(nats: float, tail: float) -> Callable[[random.Random, float], float]:
    return lambda rng, scale: nats * scale * (rng.paretovariate(tail) - 1.0)


def steps(nats: float, share: float) -> Callable[[random.Random, float], float]:
    """0 mostly; whole multiples of a rounding step otherwise: ties."""
    return lambda rng, scale: nats * (1 + (rng.random() < 0.3)) if rng.random() < share else 0.0


def none(rng: random.Random, scale: float) -> float:
    return 0.0


NOISES = (
    Noise("none", none, none),
    Noise("normal, 0.02 nats", normal(0.02), normal(0.02)),
    Noise("normal, 0.2 nats", normal(0.2), normal(0.2)),
    Noise("normal, requests of unequal scales", normal(0.02), normal(0.02), lambda rng: math.exp(rng.gauss(0.0, 1.0))),
    Noise("of batches alone, kept by pages", normal(0.05), none),
    Noise("of batches alone, kept by pages that ten read", normal(0.05), none, shared=10),
    Noise("heavy tail (Pareto 2), kept by pages that four read", pareto(0.02, 2.0), none, shared=4),
    Noise("heavy tail (Pareto 3), kept by pages", pareto(0.05, 3.0), none),
    Noise("heavy tail (Pareto 2), kept by pages", pareto(0.02, 2.0), none),
    Noise("heavy tail (Pareto 2), from run to run", pareto(0.05, 2.0), pareto(0.05, 2.0), kept=False),
    Noise("steps of 1/16 nat in half of the requests", steps(1 / 16, 0.5), steps(1 / 16, 0.5)),
    Noise("steps of 1/16 nat in 1 of 200, kept by pages", steps(1 / 16, 0.005), none),
    Noise("steps of 1/4 nat in 1 of 200, kept by pages", steps(1 / 4, 0.005), none),
)


def one_run(noise: Noise, rng: random.Random, *, planted: float | None, rounds: int = 1) -> str:
    level = Level(rounds=rounds)
    scales = [noise.scale(rng) for _ in range(REQUESTS)]
    again = [noise.again(rng, scale) for scale in scales]
    control = [noise.batch(rng, scale) for scale in scales]
    groups = {i: i // noise.shared * noise.shared for i in range(REQUESTS) if noise.shared > 1}
    pages = {i: noise.batch(rng, scale) for i, scale in enumerate(scales) if i not in groups or groups[i] == i}
    base = {i: pages[groups.get(i, i)] for i in range(REQUESTS)}
    treated = dict(base)
    if planted is not None:
        treated[rng.randrange(REQUESTS)] += planted
    repeats: dict[int, Repeats] = {}
    for i, value in treated.items():
        if len(repeats) < MOST_SUSPECTS and is_wide(value, (*again, *control)):
            repeats[i] = _repeats(noise, rng, scales[i], value, is_planted=treated[i] != base[i])
    matched = [noise.batch(rng, scale) for scale in scales]
    measured = Measured(
        treated=treated,
        again=again,
        control=control,
        matched=matched,
        now_matched=dict(enumerate(matched)),
        groups=groups,
        repeats=repeats,
    )
    told = judge(measured, level)
    for _ in range(MORE_CONTROLS):
        if not needs_more(told, measured):
            break
        control += [noise.batch(rng, scale) for scale in scales]
        told = judge(measured, level)
    told = settled(told, measured)
    if any(each.is_finding for each in told):
        return "fail"
    return "unsteady" if told else "pass"


def _repeats(noise: Noise, rng: random.Random, scale: float, value: float, *, is_planted: bool) -> Repeats:
    """A suspect asked again as a run does: a page keeps what it holds, and noise from run to run is drawn anew."""
    warm: list[float] = []
    fresh: list[float] = []
    for turn in range(REPEATS):
        if turn == GIVE_UP and not any(each > value / 2 for each in warm):
            break
        now = value if noise.kept or is_planted else noise.again(rng, scale)
        warm.append(max(0.0, now + noise.again(rng, scale)))
        fresh.append(noise.batch(rng, scale))
    return Repeats(tuple(warm), tuple(fresh))


def row(noise: Noise, runs: int) -> dict[str, object]:
    clean = [one_run(noise, random.Random(f"{noise.name}/{n}"), planted=None) for n in range(runs)]
    alarms = clean.count("fail")
    found: dict[str, object] = {
        "noise": noise.name,
        "runs": runs,
        "false alarms": alarms,
        "at most (95 %)": f"{most_share(alarms, runs):.4f}",
        "unsteady": clean.count("unsteady"),
    }
    tries = max(1, runs // 10)
    for nats in STALE:
        ends = [one_run(noise, random.Random(f"{noise.name}/{nats}/{n}"), planted=nats) for n in range(tries)]
        found[f"found of {tries}, {nats:g} nats"] = ends.count("fail")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000)
    given = parser.parse_args()
    for noise in NOISES:
        made = row(noise, given.runs)
        sys.stdout.write("  ".join(f"{key} {value}" for key, value in made.items()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
