"""Runs `kvcheck bench serve` against real servers of vLLM and SGLang on this CPU: with and without reuse, equal ones.

    python -m tools.servers.serve_prices OUT [--environments DIR] [--only CASE]... [--runs N]

reuse: one server, a load with shared beginnings beside one without. equal: two servers that were started alike; N short
runs, 20 unless it is said otherwise. Such a run may call none of its numbers faster or slower, but one run in twenty.
hicache: SGLang without its host tier and with it, under prompts that come back after a flood.

OUT gets the runs, the servers' logs, and serve.csv: a row for each number of each run.

Invariants:
- What is written is what the records say. A run that could not be made has no row, and the exit code is 4 then.
- Exit 1 where equal servers were told apart too often, or an answer was wrong.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kvcheck.core.base.errors import KvcheckError
from kvcheck.core.base.record import RunRecord
from kvcheck.core.report.prices import verdict
from tools.servers import sglang_cpu, vllm_cpu
from tools.servers.kvcheck_run import START_S, arguments, known_answers, run_kvcheck
from tools.servers.serving import Command, serving
from tools.tables.measured import append

RUNS, MOST_ALARMS = 20, 0.05
TOLD_APART = ("faster", "slower")
COLUMNS = (
    *("case", "seed", "number", "arm", "baseline", "size", "device"),
    *("us", "baseline_us", "ratio", "lo", "hi", "floor", "rounds", "verdict"),
    *("note", "tokens_judged", "hits", "exit_code", "run_id"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """start: the commands of its servers, the target's first. options: of `kvcheck bench serve`. is_repeated: whether
    it is run many times, with a seed each."""

    start: Callable[[Path, Path, Path], Sequence[Command]]
    options: tuple[str, ...]
    is_repeated: bool = False


def _served(engine: ModuleType, *variants: str) -> Callable[[Path, Path, Path], Sequence[Command]]:
    def start(environments: Path, model: Path, folder: Path) -> Sequence[Command]:
        made: list[Command] = []
        for number, variant in enumerate(variants):
            own = folder / f"server-{number}"
            own.mkdir(parents=True, exist_ok=True)
            (command,) = engine.commands(environments, model, folder=own, variant=variant)
            made.append(dataclasses.replace(command, name=f"{command.name}-{number}"))
        return made

    return start


SHORT = (
    *("--requests", "4", "--concurrency", "4", "--prompt", "96", "--answer", "8"),
    *("--rounds", "12", "--max-time", "600", "--no-reports"),
)
LONG = (
    *("--requests", "8", "--concurrency", "4", "--prompt", "1024", "--answer", "16"),
    *("--rounds", "15", "--max-time", "1500"),
)
RETURNING = (
    *("--load", "returning", "--requests", "4", "--concurrency", "2", "--prompt", "1024", "--answer", "8"),
    *("--rounds", "10", "--max-time", "1200"),
)
CASES: Mapping[str, Case] = {
    "sglang-equal": Case(start=_served(sglang_cpu, "plain", "plain"), options=SHORT, is_repeated=True),
    "vllm-equal": Case(start=_served(vllm_cpu, "plain", "plain"), options=SHORT, is_repeated=True),
    "sglang-reuse": Case(start=_served(sglang_cpu, "plain"), options=LONG),
    "vllm-reuse": Case(start=_served(vllm_cpu, "plain"), options=LONG),
    "sglang-hicache": Case(start=_served(sglang_cpu, "plain", "hicache"), options=RETURNING),
}


def main() -> int:
    parser = arguments(__doc__, CASES)
    parser.add_argument("--runs", type=int, default=RUNS)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = known_answers(given.out / "known-answers")
    codes = [
        _case(name, case, given.environments, model, given.out, given.runs)
        for name, case in CASES.items()
        if not given.only or name in given.only
    ]
    return max(codes)


def _case(name: str, case: Case, environments: Path, model: Path, out: Path, runs: int) -> int:
    folder = out / name
    folder.mkdir(exist_ok=True)
    alarms = wrong = 0
    seeds = range(1, runs + 1) if case.is_repeated else range(1, 2)
    try:
        with serving(case.start(environments, model, folder), folder=folder, within_s=START_S) as servers:
            target, *others = (server.address for server in servers)
            versus = [word for address in others for word in ("--versus", address)]
            for seed in seeds:
                words = [target, *versus, "--known-answers", str(model), "--seed", str(seed)]
                code, record = run_kvcheck(folder, "bench", "serve", *words, *case.options)
                rows = rows_of(record, name=name, seed=seed, code=code)
                append(out / "serve.csv", COLUMNS, rows)
                wrong += any(row["exit_code"] == 1 for row in rows)
                alarms += case.is_repeated and any(row["verdict"] in TOLD_APART for row in rows)
                sys.stdout.write(f" {name} {seed}: {', '.join(_told(row) for row in rows)}\n")
                sys.stdout.flush()
    except KvcheckError as error:
        sys.stdout.write(f" {name}: not made: {error}\n")
        return 4
    return int(bool(wrong) or alarms > MOST_ALARMS * len(seeds))


def rows_of(record: RunRecord, *, name: str, seed: int, code: int) -> list[dict[str, object]]:
    seen = record.evidence.observed
    return [
        {
            "case": name,
            "seed": seed,
            "number": row.case,
            **{key: getattr(row, key) for key in ("arm", "baseline", "size", "device", "note")},
            "us": _digits(row.us.est),
            "baseline_us": _digits(row.baseline_us.est),
            **{key: _digits(value) for key, value in zip(("ratio", "lo", "hi"), _ends(row.ratio), strict=True)},
            "floor": _digits(row.floor),
            "rounds": len(row.ratios),
            "verdict": verdict(row, None),
            "tokens_judged": seen.get("token", 0),
            "hits": seen.get("hit", "n/a"),
            "exit_code": code,
            "run_id": record.run_id,
        }
        for row in record.bench
    ]


def _ends(ratio: object) -> tuple[float | None, ...]:
    return tuple(getattr(ratio, name) for name in ("est", "lo", "hi"))


def _digits(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4g}"


def _told(row: Mapping[str, object]) -> str:
    return f"{row['number']} {row['ratio']} floor {row['floor']} {row['verdict']}"


if __name__ == "__main__":
    sys.exit(main())
