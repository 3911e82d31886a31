"""Runs `kvcheck live --own-model` against SGLang and vLLM on this CPU, without and with a planted page.

    PYTHONPATH=tests python -m tools.servers.own_trials OUT [--environments DIR] [--only CASE]... [--runs N]
        [--within S]

equal    a random model and no fault: how many runs accuse
stale    a random model: one page of one layer, of one treated request of about 50, keeps its former content
foreign  the same, with another request's keys and values
needle   a model that recites, asked one request at a time: the page with the code that is asked for holds the same page
         of another request. The answer recites that one's code
SCENARIO a random model and no fault, in another scenario than prefix-cache and a pool that is too small for it

OUT gets the runs, the servers' logs, and trials.csv.

Invariants:
- A page is planted while the treated arm is sent, never in a reference or a control. What was planted is read from the
  fault's own log, never from what kvcheck says.
- A trial is found if a finding names a request that the log names. A finding that names another one is counted beside.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rigs.own_models import copying_model, random_model

from kvcheck.core.base.record import RunRecord
from kvcheck.core.live.exchange import Answer, Sending
from kvcheck.core.live.own import runner as own_runner
from kvcheck.core.live.own.arms import Treated
from kvcheck.core.live.own.prompts import FRAME
from tools.servers import sglang_cpu, vllm_cpu
from tools.servers.faults.planting import FOREIGN, STALE, Order, events, fault_log, fault_orders
from tools.servers.kvcheck_run import START_S, arguments, run_kvcheck
from tools.servers.serving import serving
from tools.tables.measured import append

ENGINES = {"sglang": sglang_cpu, "vllm": vllm_cpu}
LAYERS = 2
SMALL = {"layers": LAYERS, "hidden": 128, "heads": 2}
RECITED, DRAWN = 16384, 1024
"""Token ids of the model that recites, which leaves a code where the request itself has a token of it, and of the
random one."""
COLUMNS = (
    *("case", "run", "exit_code", "codes", "requests", "noise", "layer", "page", "is_found", "beside"),
    *("seconds", "note"),
)
NOTE = 300
FIRST = 4
"""Of 24 requests that are sent one at a time, so many compute all of their pages; the next ones have hits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """engine, kind of fault (None: none), whether the model recites, the scenario, whether the pool is small, and the
    options of each run."""

    engine: str
    kind: str | None
    recites: bool = False
    scenario: str = "prefix-cache"
    is_small: bool = False
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        if self.scenario != "prefix-cache":
            return f"{self.engine}-{self.scenario}"
        return f"{self.engine}-{'needle' if self.recites else self.kind or 'equal'}"


CASES = tuple(
    case
    for engine in ENGINES
    for case in (
        Case(engine=engine, kind=STALE, options=("--requests", "50")),
        Case(engine=engine, kind=None, options=("--requests", "24")),
        Case(engine=engine, kind=FOREIGN, recites=True, options=("--requests", "24", "--concurrency", "1")),
        Case(engine=engine, kind=FOREIGN, options=("--requests", "50")),
        *(
            Case(engine=engine, kind=None, scenario=scenario, is_small=True, options=("--requests", "12", "--admin"))
            for scenario in ("retract-resume", "aborts")
        ),
    )
)


class Planting(Treated):
    """The treated arm, which has a page planted once it has come to a request."""

    plan: Callable[[int, Sending], Order | None] = staticmethod(lambda count, sending: None)
    orders: Path
    asked = 0
    ordered = ""
    """The name of the request that the page is meant for."""

    def ask(self, sending: Sending) -> Answer:
        with self._lock:
            order = type(self).plan(Planting.asked, sending)
            Planting.asked += 1
            if order is not None:
                order.give(Planting.orders)
                Planting.ordered = sending.rid
        return super().ask(sending)


def main() -> int:
    parser = arguments(__doc__, [case.name for case in CASES])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--within", type=float, default=1e9, help="seconds for each case")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    own_runner.Treated = Planting  # type: ignore[attr-defined]
    for case in CASES:
        if not given.only or case.name in given.only:
            run_case(case, given.out, given.environments, runs=given.runs, within_s=given.within)
    return 0


def run_case(case: Case, out: Path, environments: Path, *, runs: int, within_s: float) -> None:
    folder = out / case.name
    folder.mkdir(parents=True, exist_ok=True)
    model = (
        copying_model(out / "copying", vocabulary=RECITED)
        if case.recites
        else random_model(out / "random", vocabulary=DRAWN, **SMALL)
    )
    engine = ENGINES[case.engine]
    sizes = engine.Sizes() if case.is_small else engine.Sizes(slots=8192)
    commands = engine.commands(environments, model, folder=folder, sizes=sizes, has_faults=case.kind is not None)
    with serving(commands, folder=folder, within_s=START_S) as (server,):
        until = time.monotonic() + within_s
        for number in range(runs):
            if time.monotonic() >= until:
                break
            row = _trial(case, folder, server.address, number)
            append(out / "trials.csv", COLUMNS, [row])
            sys.stdout.write("  ".join(f"{value}" for value in row.values()) + "\n")
            sys.stdout.flush()


def _trial(case: Case, folder: Path, address: str, number: int) -> dict[str, object]:
    """One run: what came of it beside what the log says was planted."""
    orders, log = fault_orders(folder), fault_log(folder)
    orders.unlink(missing_ok=True)
    before, began = len(events(log)), time.monotonic()
    Planting.orders, Planting.asked, Planting.ordered = orders, 0, ""
    Planting.plan = staticmethod(_plan(case, number, ENGINES[case.engine].PAGE))
    code, record = _stress(case, folder, address, number)
    orders.unlink(missing_ok=True)
    planted = events(log)[before:]
    named = {str(event["request"]) for event in planted if event["event"] in ("planted", "reads")}
    rids = [str((finding.minimal or {}).get("rid")) for finding in record.findings]
    beside = [rid for rid in rids if not any(rid in name for name in named)]
    is_found = code == 1 and len(beside) < len(rids)
    where: Mapping[str, object] = next((event for event in planted if event["event"] == "planted"), {})
    return {
        "case": case.name,
        "run": record.run_id,
        "exit_code": code,
        "codes": " ".join(sorted({finding.code for finding in record.findings})),
        "requests": record.evidence.requests,
        "noise": _noise(record),
        "layer": where.get("layer", ""),
        "page": where.get("page", ""),
        "is_found": "" if case.kind is None else int(is_found),
        "beside": len(beside),
        "seconds": round(time.monotonic() - began),
        "note": _note(case, record, str(where.get("request", ""))),
    }


def _note(case: Case, record: RunRecord, planted: str) -> str:
    """What a run without a finding lacked, and what has to have happened in a scenario that is not prefix-cache.

    planted: the request whose page was damaged, "" if none. A page with a code that nobody asks for is no needle.
    """
    if case.kind is not None and not planted:
        return "nothing was planted"
    if case.recites and Planting.ordered not in planted:
        return "nothing was planted in the ordered request"
    seen = {kind: count for kind, count in record.evidence.observed.items() if kind in ("retract", "abort") and count}
    reasons = [row.reason for row in record.scenarios if row.reason]
    return "; ".join([*(f"{kind} {count}" for kind, count in seen.items()), *reasons])[:NOTE]


def _plan(case: Case, number: int, page: int) -> Callable[[int, Sending], Order | None]:
    """When a page is planted: at a request that computes it. count: of the treated request, from 0."""
    if case.kind is None:
        return lambda count, sending: None
    layer = 1 if case.recites else number % LAYERS

    def plan(count: int, sending: Sending) -> Order | None:
        if count != number % FIRST and case.recites:
            return None
        if count != number % 40 and not case.recites:
            return None
        ids = sending.question.ids
        if not case.recites:
            return Order(kind=str(case.kind), layer=layer, page=-1)
        asked = next(at for at in range(len(ids)) if ids[at : at + FRAME] == ids[-FRAME:])
        return Order(kind=str(case.kind), layer=layer, page=(asked + FRAME) // page, same=1)

    return plan


def _stress(case: Case, folder: Path, address: str, number: int) -> tuple[int, RunRecord]:
    vocabulary = str(RECITED if case.recites else DRAWN)
    words = [address, case.scenario, "--own-model", "--vocabulary", vocabulary, "--seed", str(number + 1)]
    return run_kvcheck(folder, "live", *words, "--no-reports", *case.options)


def _noise(record: RunRecord) -> str:
    """The largest deviation of each arm, nats."""
    facts = record.environment["server"]
    assert isinstance(facts, dict)
    arms = next(iter(facts["own_model"].values()))["arms"]
    return " ".join(f"{arm['arm']}={arm['largest']:.3g}" for arm in arms if arm["largest"] is not None)


if __name__ == "__main__":
    sys.exit(main())
