"""New host traces per CPU second, before and after: a table.

    PYTHONPATH=.:tests python tests/mutants/trace_table.py OUT.csv --before TREE [--seconds S] [--alternations N]

Before: a tiny shape, strategy random, in the working tree of the past. After: the micro shape of the same model, chance
answers and every schedule within ANSWERS answers of the eager order, in this tree. An arm runs schedules of one
workload for S CPU seconds, the hashing included, in a process of its own; the arms take turns. The before arm hashes
the same events as core/stress/host_trace.py. An arm has the variant of its first schedule: in hicache, no page store
before, and one in memory after. Requests: those of the scenario where the table has none. A window ends sooner where
no schedule is left.

Invariants:
- A trace is new if no schedule before it in its window had it. The reference run is not counted, nor are imports.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CELLS = (("retract-resume", "glm-5.1"), ("retract-resume", "llama-3"), ("hicache", "llama-3"))
REQUESTS = {"hicache": 24}
"""Requests of the workload after, where they are not the scenario's own: half as many."""
ARMS = ("before", "answers", "within")
ANSWERS, SEED = 2, 1
COLUMNS = ("cell", "arm", "alternation", "requests", "cpu_s", "schedules", "traces", "traces_per_s")
OLD_KINDS = ("Submitted", "Recorded", "LaneWaited", "HostJoined", "HostDrained", "HostActs")
"""What the process does, as events of the tree of the past."""


class Traces:
    """The host trace of one schedule of an older tree, from its events."""

    def __init__(self) -> None:
        self.hash = blake2b(digest_size=8)

    def __call__(self, event: Any) -> None:
        """One more event of the process."""
        kind = type(event).__name__
        self.hash.update(kind.encode())
        for field in fields(event):
            if field.name in ("record", "lane", "name", "request", "host"):
                self.hash.update(f"{getattr(event, field.name)}|".encode())
        for footprint in (*getattr(event, "reads", ()), *getattr(event, "writes", ())):
            buffers = getattr(footprint, "buffers", getattr(footprint, "buffer", ""))
            self.hash.update(f"{footprint.space}{buffers}{footprint.layers}".encode())
            for ids in (footprint.rows, footprint.spans):
                if ids is not None:
                    self.hash.update(ids.tobytes())


def old_traces(scenario: str, model: str, seconds: float) -> Iterator[int]:
    """One number a schedule, of a tree without host traces: random orders of one workload with one variant."""
    engine = importlib.import_module("kvcheck.core.stress.engine")
    events = importlib.import_module("kvcheck.core.stress.events")
    plan_of = importlib.import_module("kvcheck.core.stress.schedule").Plan
    builtin = importlib.import_module("kvcheck.core.targets.builtin")
    random_strategy = importlib.import_module("kvcheck.core.stress.strategies").RandomStrategy
    backends = importlib.import_module("kvcheck.core.backend.simulated").SimulatedBackend
    kinds = [getattr(events, name) for name in OLD_KINDS]
    runner = engine.StressEngine(builtin.BuiltinTarget())
    plan = plan_of(scenario=scenario, shape=f"{model}-tiny", strategy="random", seed=SEED)
    runner._workload(engine.scenario_of(plan), plan)
    number = 0
    recorder = engine.Recorder

    def backend_of(plan: Any, history: Any) -> Any:
        drawn = recorder(random_strategy(SEED * 1_000_003 + number))
        return backends(drawn, history), drawn

    engine._backend = backend_of  # one workload and one variant: only the order is another one each time
    began = time.process_time()
    while time.process_time() - began < seconds:
        trace = Traces()
        runner.run(plan, handlers=[(kind, trace) for kind in kinds])
        number += 1
        yield int.from_bytes(trace.hash.digest(), "big")


def new_traces(scenario: str, model: str, seconds: float, arm: str) -> Iterator[int]:
    """One number a schedule: chance answers, or all within ANSWERS."""
    from kvcheck.core.base.rng import Rng
    from kvcheck.core.stress.answers import AnswersStrategy, by_chance
    from kvcheck.core.stress.exploring import Exploration
    from kvcheck.core.stress.schedule import NO_EXTRAS, Plan
    from kvcheck.core.targets.builtin import BuiltinTarget

    module = importlib.import_module("kvcheck.core.stress.runner")
    runner = module.ScheduleRunner(BuiltinTarget())
    requests = REQUESTS.get(scenario)
    first = Plan(
        scenario=scenario,
        shape=f"{model}-micro",
        strategy="answers",
        seed=SEED,
        requests=requests,
        extras=NO_EXTRAS,
    )
    runner.workloads.of(first)
    exploration = Exploration(first, workloads=1, within=ANSWERS)
    number = 0

    def chance(plan: Any) -> AnswersStrategy:
        return AnswersStrategy(by_chance(Rng(SEED * 1_000_003 + number)))

    if arm == "answers":
        module.chooser_of = chance
    began = time.process_time()
    while time.process_time() - began < seconds:
        due = first if arm == "answers" else exploration.next()
        if due is None:
            return
        outcome = runner.run(replace(due, extras=NO_EXTRAS))
        if arm == "within":
            exploration.took(outcome.refused, outcome.asked, outcome.trace)
        number += 1
        yield outcome.trace


def window(scenario: str, model: str, arm: str, seconds: float) -> dict[str, object]:
    """One arm, in this process."""
    traces = old_traces(scenario, model, seconds) if arm == "before" else new_traces(scenario, model, seconds, arm)
    seen: list[int] = []
    next_one = next(traces)  # what is loaded for the first schedule is loaded now
    began = time.process_time()
    seen.append(next_one)
    seen += traces
    took = time.process_time() - began
    counts = len(seen) - 1, len({*seen}) - 1
    return dict(zip(COLUMNS[4:], (round(took, 2), *counts, round(counts[1] / took, 2)), strict=True))


def summary(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """A line of markdown for each cell: medians of the windows, and how many times those before."""
    lines = ["| cell | before | chance answers | within two answers |", "|---|---|---|---|"]
    for cell in dict.fromkeys(str(each["cell"]) for each in rows):
        own = {arm: [each for each in rows if each["cell"] == cell and each["arm"] == arm] for arm in ARMS}
        rates = {arm: median(float(str(each["traces_per_s"])) for each in windows) for arm, windows in own.items()}
        texts = [f"{rates[arm]:.2f}, x{rates[arm] / rates['before']:.1f}" for arm in ARMS[1:]]
        lines.append(f"| {cell} | {rates['before']:.2f} | {' | '.join(texts)} |")
    return lines


def main() -> None:
    """Write the table, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", action="append", choices=["/".join(cell) for cell in CELLS], help="cells")
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--window", nargs=3, metavar=("SCENARIO", "MODEL", "ARM"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.window is not None:
        sys.stdout.write(json.dumps(window(*given.window, given.seconds)) + "\n")
        return
    rows: list[dict[str, object]] = []
    with given.out.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for at in range(given.alternations):
            for scenario, model in (cell for cell in CELLS if "/".join(cell) in (given.only or ["/".join(cell)])):
                for arm in ARMS:
                    tree = given.before if arm == "before" else ROOT
                    words = [sys.executable, "-P", __file__, str(given.out), "--seconds", str(given.seconds)]
                    done = subprocess.run(
                        [*words, "--window", scenario, model, arm],
                        env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    if done.returncode:
                        raise SystemExit(done.stderr)
                    requests = "" if arm == "before" else REQUESTS.get(scenario, "")
                    cell = {"cell": f"{scenario}/{model}", "arm": arm, "alternation": at, "requests": requests}
                    rows.append(cell | json.loads(done.stdout))
                    writer.writerow(rows[-1])
                    stream.flush()
    sys.stdout.write("\n".join(summary(rows)) + "\n")


if __name__ == "__main__":
    main()
