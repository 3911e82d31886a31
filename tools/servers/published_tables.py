"""Tables of published pages about servers, made of the CSV files beside them.

    python -m tools.servers.published_tables

Invariants:
- A figure is counted from the rows of a file, never typed.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
SERVE, OWN = PUBLISHED / "serve", PUBLISHED / "own-model"
NUMBERS = ("serve-throughput", "serve-first-token", "serve-next-token")
TOLD_APART = ("faster", "slower")
NOT_PLANTED = "nothing was planted"
Row = Mapping[str, str]


def main() -> int:
    for line in (*reuse(read(SERVE / "serve.csv")), "", *equal(read(SERVE / "serve.csv")), ""):
        sys.stdout.write(line + "\n")
    for line in own(read(OWN / "trials.csv")):
        sys.stdout.write(line + "\n")
    return 0


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


def reuse(rows: Sequence[Row]) -> list[str]:
    """One run of a case: each number as ratio, interval and floor, and the integrity of its traffic."""
    made = []
    for case, members in _by_case(rows):
        if _is_equal(case):
            continue
        of = {row["number"]: row for row in members}
        first = members[0]
        prices = " | ".join(_price(of.get(number)) for number in NUMBERS)
        made.append(
            f"| `{case}` | {first['arm']} to {first['baseline']} | {first['rounds']} | {prices} | "
            f"{int(first['tokens_judged']):,} | {_wrong(members)} |"
        )
    return made


def _price(row: Row | None) -> str:
    if row is None:
        return "not a measurement"
    return f"{row['ratio']} [{row['lo']}, {row['hi']}], floor {float(row['floor']):.0%}: {row['verdict']}"


def equal(rows: Sequence[Row]) -> list[str]:
    """Runs of equal servers: how many were told apart, and how far the numbers lay from 1."""
    made = []
    for case, members in _by_case(rows):
        if not _is_equal(case):
            continue
        runs = sorted({row["run_id"] for row in members})
        apart = {row["run_id"] for row in members if row["verdict"] in TOLD_APART}
        ratios = " | ".join(_ratios([row for row in members if row["number"] == number]) for number in NUMBERS)
        tokens = sum({row["run_id"]: int(row["tokens_judged"]) for row in members}.values())
        made.append(f"| `{case}` | {len(apart)} of {len(runs)} | {ratios} | {tokens:,} | {_wrong(members)} |")
    return made


def _ratios(rows: Sequence[Row]) -> str:
    ratios, floors = [float(row["ratio"]) for row in rows], [float(row["floor"]) for row in rows]
    return f"{min(ratios):.2f} to {max(ratios):.2f}, floor {median(floors):.0%}"


def _wrong(rows: Iterable[Row]) -> int:
    return len({row["run_id"] for row in rows if row["exit_code"] == "1"})


def _is_equal(case: str) -> bool:
    return case.endswith("-equal")


def own(rows: Sequence[Row]) -> list[str]:
    """Trials of a user's own model: accusations, or what was found, with the noise of controls and treated requests."""
    made = []
    for case, members in _by_case(rows):
        planted = [row for row in members if row["is_found"] and not row["note"].startswith(NOT_PLANTED)]
        clean = [row for row in members if row["note"] == NOT_PLANTED]
        if any(row["is_found"] for row in members):
            result = f"{sum(row['is_found'] == '1' for row in planted)} of {len(planted)} found"
            codes = [sum(code in row["codes"].split() for row in planted) for code in ("KV809", "KV810")]
            result += f"; {codes[0]} with KV809, {codes[1]} with KV810"
            if beside := sum(int(row["beside"] or 0) for row in planted):
                result += f"; {beside} findings of other requests"
            if clean:
                result += f"; {sum(row['exit_code'] == '1' for row in clean)} of {len(clean)} without a page accused"
        else:
            result = f"{sum(row['exit_code'] == '1' for row in members)} of {len(members)} runs accused"
        noise, treated = _largest(members, ("again", "control")), _largest(planted or members, ("treated",))
        seconds = median(int(row["seconds"]) for row in members)
        made.append(
            f"| `{case}` | {median(int(row['requests']) for row in members):.0f} | {result} | "
            f"{_unknown(members)} | {max(noise, default=0.0):.3g} | {min(treated):.3g} to {max(treated):.3g} | "
            f"{seconds:.0f} |"
        )
    return made


def _unknown(rows: Sequence[Row]) -> int:
    return sum(row["exit_code"] == "4" for row in rows)


def _largest(rows: Sequence[Row], arms: Sequence[str]) -> list[float]:
    """The largest deviation of these arms in each run, nats."""
    held = [dict(each.split("=") for each in row["noise"].split()) for row in rows]
    return [float(arm[name]) for arm in held for name in arms if name in arm]


def _by_case(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    cases: dict[str, list[Row]] = {}
    for row in rows:
        cases.setdefault(row["case"], []).append(row)
    return list(cases.items())


if __name__ == "__main__":
    sys.exit(main())
