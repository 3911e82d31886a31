"""Runs `kvcheck stress` against real servers of vLLM, SGLang and llama.cpp on this CPU, with and without faults.

    python -m tools.servers.real_servers OUT [--environments DIR] [--only CASE]...

Each case starts its servers, runs kvcheck against them as a user does, and stops them. A clean case has to pass with
so many judged tokens, retractions and hits. A case with faults plants one page 20 times, or breaks a rule of a layer's
attention for requests with hits; kvcheck has to find each, and to name layer and page, or the layer, of most.

OUT gets the runs, the servers' logs, and summary.json, which README.md of a publication is made from.

Invariants:
- What was planted is read from the fault's own log, never from what kvcheck says.
- A case that could not be tried is told with its reason, and the exit code is 4 then; 1 where a case fell short.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType

from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.base.record import RunRecord
from kvcheck.core.live.conclusion import common_place
from tools.servers import llama_cpp, sglang_cpu, vllm_cpu
from tools.servers.faults.planting import (
    SINK_LOST,
    SINK_TWICE,
    WINDOW_LONGER,
    WINDOW_SHORTER,
    Order,
    events,
    fault_log,
    fault_orders,
)
from tools.servers.kvcheck_run import START_S, NoRecord, arguments, known_answers, run_kvcheck
from tools.servers.llama_gguf import write_gguf
from tools.servers.serving import Command, Server, serving

FOR_FAULTS = ("--nodes", "16384")
"""With more nodes, a page of another request seldom holds a second key for a node: docs/live.md, "Places"."""
LAYERS = 4
TRIALS, NAMED, ATTEMPTS = 20, 18, 5
KINDS = ("stale", "foreign")
BROKEN_RULES: Mapping[str, tuple[tuple[str, int], ...]] = {
    "window": tuple((kind, layer) for layer in (0, 2) for kind in (WINDOW_LONGER, WINDOW_SHORTER)),
    "sink": tuple((kind, layer) for layer in range(LAYERS) for kind in (SINK_TWICE, SINK_LOST)),
}
"""Kinds and layers that take turns. Every second layer has a window, each has sinks."""
TWICE_IN_FULL = 5
"""Of 20 trials of sinks: a sink of twice the strength in a layer without a window. It takes all bits of that layer, and
the answer that bits are lacking names it and the layer before it alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One set-up. start: the commands of its servers. scenarios, options: of `kvcheck stress`. stand_ins: what takes
    the place of what only a GPU has, in words. floors: what a clean run has to have seen. faults: kind of page that is
    planted, or a row of BROKEN_RULES; None: a clean run. named: trials whose place has to be named. model:
    options of `kvcheck model make` beside those of each case.
    """

    name: str
    start: Callable[[Place], Sequence[Command]]
    scenarios: tuple[str, ...]
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    floors: Mapping[str, int] = field(default_factory=dict)
    faults: str | None = None
    named: int = NAMED
    model: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    environments: Path
    model: Path
    folder: Path
    has_faults: bool


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a case came to. shortfall: why it is no success; None for one. cpu_s: of servers and of kvcheck."""

    name: str
    seen: dict[str, int] = field(default_factory=dict)
    exit_code: int | None = None
    found: int | None = None
    named: int | None = None
    trials: list[dict[str, object]] | None = None
    runs: list[str] = field(default_factory=list)
    shortfall: str | None = None
    is_tried: bool = True
    wall_s: float = 0.0
    cpu_s: float = 0.0
    notes: list[str] = field(default_factory=list)
    stand_ins: dict[str, str] = field(default_factory=dict)


def _served(
    engine: ModuleType, variant: str, sizes: vllm_cpu.Sizes | None = None
) -> Callable[[Place], Sequence[Command]]:
    def start(place: Place) -> Sequence[Command]:
        return tuple(
            engine.commands(
                place.environments,
                place.model,
                folder=place.folder,
                variant=variant,
                sizes=sizes,
                has_faults=place.has_faults,
            )
        )

    return start


def _llama_cpp(place: Place) -> Sequence[Command]:
    gguf = place.folder / "known-answers.gguf"
    if not gguf.exists():
        write_gguf(place.model, gguf)
    return llama_cpp.commands(place.environments, gguf)


MLA = ("--arch", "deepseek-v3")
WINDOWS = ("--arch", "gpt-oss", "--window", "64")
STATES = ("--arch", "qwen3-next", "--nodes", "1024")
PRESS = ("prefix-cache", "retract-resume", "aborts", "priority")
CASES = (
    Case(
        name="vllm",
        start=_served(vllm_cpu, "priority"),
        scenarios=PRESS,
        options=("--schedules", "10", "--concurrency", "16"),
        floors={"token": 100_000, "retract": 100, "hit-token": 5_000, "evict": 1_000, "abort": 20},
    ),
    Case(
        name="vllm-windows",
        start=_served(vllm_cpu, "priority", vllm_cpu.WITH_WINDOWS),
        scenarios=PRESS,
        options=("--schedules", "2"),
        floors={"token": 10_000, "retract": 20, "hit-token": 1_000, "evict": 500, "abort": 10},
        model=WINDOWS,
    ),
    Case(
        name="vllm-states",
        start=_served(vllm_cpu, "priority", vllm_cpu.WITH_STATES),
        scenarios=("prefix-cache",),
        options=("--schedules", "1"),
        floors={"token": 1_000, "hit-token": 1_000},
        model=STATES,
    ),
    Case(
        name="sglang",
        start=_served(sglang_cpu, "priority"),
        stand_ins=sglang_cpu.stand_ins("priority"),
        scenarios=PRESS,
        options=("--schedules", "4"),
        floors={"token": 50_000, "retract": 100, "hit-token": 5_000, "evict": 1_000, "abort": 20},
    ),
    Case(
        name="sglang-hicache",
        start=_served(sglang_cpu, "hicache"),
        stand_ins=sglang_cpu.stand_ins("hicache"),
        scenarios=("hicache",),
        options=("--schedules", "4"),
        floors={"token": 1_000, "load-back": 1_000},
    ),
    Case(
        name="sglang-pair",
        start=_served(sglang_cpu, "pair"),
        stand_ins=sglang_cpu.stand_ins("pair"),
        scenarios=("pd-transfer",),
        options=("--schedules", "5"),
        floors={"token": 10_000, "transfer": 100},
    ),
    Case(
        name="sglang-mla",
        start=_served(sglang_cpu, "mla"),
        stand_ins=sglang_cpu.stand_ins("mla"),
        scenarios=("prefix-cache", "retract-resume", "aborts"),
        options=("--schedules", "2"),
        floors={"token": 10_000, "retract": 20, "hit-token": 1_000, "evict": 500, "abort": 10},
        model=MLA,
    ),
    Case(
        name="llama.cpp",
        start=_llama_cpp,
        scenarios=("prefix-cache", "aborts"),
        options=("--schedules", "4"),
        floors={"token": 10_000, "hit-token": 1_000, "abort": 10},
    ),
    *(
        Case(
            name=f"{engine}-{kind}",
            start=start,
            stand_ins=stand_ins,
            scenarios=("prefix-cache",),
            faults=kind,
            model=model,
        )
        for engine, start, stand_ins, model in (
            ("vllm", _served(vllm_cpu, "priority"), {}, ()),
            ("sglang", _served(sglang_cpu, "plain"), sglang_cpu.stand_ins("plain"), ()),
            ("sglang-mla", _served(sglang_cpu, "mla"), sglang_cpu.stand_ins("mla"), MLA),
        )
        for kind in KINDS
    ),
    *(
        Case(
            name=f"vllm-windows-{kind}",
            start=_served(vllm_cpu, "priority", vllm_cpu.WITH_WINDOWS),
            scenarios=("prefix-cache",),
            faults=kind,
            named=TRIALS - TWICE_IN_FULL if kind == "sink" else NAMED,
            model=WINDOWS,
        )
        for kind in BROKEN_RULES
    ),
)


def main() -> int:
    given = arguments(__doc__, [case.name for case in CASES]).parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for case in CASES:
        if given.only and case.name not in given.only:
            continue
        place = Place(
            environments=given.environments,
            model=_model(given.out, case),
            folder=given.out / case.name,
            has_faults=case.faults is not None,
        )
        outcomes.append(run_case(case, place))
        _write(given.out / "summary.json", outcomes)
        sys.stdout.write(_line(outcomes[-1]) + "\n")
        sys.stdout.flush()
    if not all(outcome.is_tried for outcome in outcomes):
        return 4
    return int(any(outcome.shortfall for outcome in outcomes))


def _model(folder: Path, case: Case) -> Path:
    options = (*case.model, *(FOR_FAULTS if case.faults else ()))
    return known_answers(folder / "-".join(["known-answers", *(each.lstrip("-") for each in options)]), *options)


def run_case(case: Case, place: Place) -> Outcome:
    outcome = Outcome(name=case.name)
    began = time.monotonic()
    place.folder.mkdir(parents=True, exist_ok=True)
    own = _own_s()
    servers: tuple[Server, ...] = ()
    try:
        with serving(case.start(place), folder=place.folder, within_s=START_S) as servers:
            if case.faults is None:
                _clean(case, place, servers, outcome)
            else:
                _planted(case, place, servers, outcome)
    except KvcheckError as error:
        outcome.is_tried, outcome.shortfall = False, str(error)
    called = sglang_cpu.called(place.folder) if case.stand_ins else {}
    for name, text in case.stand_ins.items():
        counts = ", ".join(f"{key} {count:,}" for key, count in called.items() if key.startswith(name))
        outcome.stand_ins[name] = f"{text}; calls: {counts or 'never put in'}"
    outcome.wall_s = round(time.monotonic() - began, 1)
    outcome.cpu_s = round(sum(server.cpu_s() for server in servers) + _own_s() - own, 1)
    return outcome


def _clean(case: Case, place: Place, servers: Sequence[Server], outcome: Outcome) -> None:
    code, record = _stress(place, servers, *case.scenarios, "--seed", "1", "--admin", *case.options)
    outcome.exit_code = code
    outcome.runs.append(record.run_id)
    outcome.seen = dict(record.evidence.observed)
    outcome.notes += record.warnings
    lacking = [
        f"{kind} {outcome.seen.get(kind, 0)} of {least}"
        for kind, least in case.floors.items()
        if outcome.seen.get(kind, 0) < least
    ]
    if code != 0:
        outcome.shortfall = f"exit {code}: " + "; ".join(row.reason or row.verdict.value for row in record.scenarios)
    elif lacking:
        outcome.shortfall = "too little seen: " + ", ".join(lacking)


def _planted(case: Case, place: Place, servers: Sequence[Server], outcome: Outcome) -> None:
    """One page of one layer is planted, or one rule broken, 20 times; each layer and several pages in turn."""
    outcome.trials, outcome.found, outcome.named = [], 0, 0
    clean, _ = _stress(place, servers, *case.scenarios, "--seed", "99", *_SMALL)
    if clean != 0:
        outcome.shortfall = f"the server without a fault: exit {clean}"
        return
    for trial in range(TRIALS):
        code, record, planted = _trial(case, place, servers, trial)
        is_found, is_named = judge_trial(record, planted)
        outcome.found += is_found and code == 1
        outcome.named += is_named
        where = next(event for event in planted if event["event"] == "planted")
        named = common_place(record.findings)
        outcome.trials.append(
            {
                **{name: where.get(name) for name in ("kind", "layer", "page", "positions")},
                "exit_code": code,
                "findings": len(record.findings),
                "codes": sorted({finding.code for finding in record.findings}),
                "named_layer": None if named is None else named[0],
                "named_page": None if named is None else named[1],
                "is_found": is_found and code == 1,
                "is_named": is_named,
                "run": record.run_id,
            }
        )
        if not (is_found and is_named):
            told = json.dumps([event for event in planted if event["event"] != "gone"])
            outcome.notes.append(f"trial {trial}: exit {code}, planted {told[:600]}, found {_places(record)}")
    if outcome.found < TRIALS or outcome.named < case.named:
        outcome.shortfall = f"found {outcome.found} of {TRIALS}, named {outcome.named}"


def _trial(
    case: Case, place: Place, servers: Sequence[Server], trial: int
) -> tuple[int, RunRecord, list[dict[str, object]]]:
    """One planted run: exit code, record, and what the fault's log says. Other seeds are tried where nothing was
    planted: no prefill filled the ordered page in one step, or no request with a hit asked what the rule decides."""
    orders, log = fault_orders(place.folder), fault_log(place.folder)
    for attempt in range(ATTEMPTS):
        before = len(events(log))
        planted_order(str(case.faults), trial).give(orders)
        seed = str(1 + trial + 1000 * attempt)
        code, record = _stress(place, servers, *case.scenarios, "--seed", seed, *_SMALL)
        orders.unlink()
        planted = events(log)[before:]
        if any(event["event"] == "planted" for event in planted):
            return code, record, planted
    raise NoRecord(f"nothing was planted in {ATTEMPTS} runs of trial {trial}; see {log}")


_SMALL = ("--schedules", "1", "--requests", "12", "--concurrency", "4", "--no-reports")


def planted_order(faults: str, trial: int) -> Order:
    if faults in BROKEN_RULES:
        kind, layer = BROKEN_RULES[faults][trial % len(BROKEN_RULES[faults])]
        return Order(kind=kind, layer=layer)
    return Order(kind=faults, layer=trial % LAYERS, page=1 + trial // LAYERS % 2)


def judge_trial(record: RunRecord, planted: Sequence[Mapping[str, object]]) -> tuple[bool, bool]:
    """Whether what was planted was found, and whether most wrong requests point to its layer and page first; to its
    layer, where it has no page."""
    where = {(event["layer"], event.get("page")) for event in planted if event["event"] in ("planted", "reads")}
    named = common_place(record.findings)
    is_named = named is not None and (named[:2] in where or (named[0], None) in where)
    return bool(where) and bool(record.findings), is_named


def _places(record: RunRecord) -> list[tuple[int | None, int | None]]:
    return [(finding.layer, finding.page) for finding in record.findings]


def _stress(place: Place, servers: Sequence[Server], *arguments: str) -> tuple[int, RunRecord]:
    decode = ("--decode", servers[1].address) if len(servers) > 1 else ()
    given = (*arguments, *decode, "--known-answers", str(place.model))
    return run_kvcheck(place.folder, "live", servers[0].address, *given)


def _own_s() -> float:
    """CPU seconds of this process so far, which are kvcheck's."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _write(path: Path, outcomes: Sequence[Outcome]) -> None:
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n", encoding="utf-8")
    draft.replace(path)


def _line(outcome: Outcome) -> str:
    state = "not tried" if not outcome.is_tried else "short" if outcome.shortfall else "ok"
    planted = (
        "" if outcome.trials is None else f"  found {outcome.found}, named {outcome.named} of {len(outcome.trials)}"
    )
    seen = "  ".join(f"{kind} {count:,}" for kind, count in outcome.seen.items() if count)
    why = f"  {outcome.shortfall}" if outcome.shortfall else ""
    return f" {state:<9} {outcome.name:<16} {outcome.wall_s:.0f} s, {outcome.cpu_s:.0f} CPU s{planted}  {seen}{why}"


if __name__ == "__main__":
    sys.exit(main())
