"""How many CPU seconds a default run takes to find each hand-written mutant, before and after: a table.

    PYTHONPATH=.:tests python tests/mutants/kill_table.py OUT.csv --before TREE [--only MUTANT]... [--seed N]

TREE: a working tree of the past (git worktree add TREE COMMIT), whose own order of cells and own code is the arm
"before". For a mutant that it does not have, "before" is its policy on the code of this tree, which understates the
gain. The arms take turns mutant by mutant, so that a busy machine slows both. kill_arm.py says what is counted.

Invariants:
- A mutant that an arm does not find counts as the cap, kill_arm.CAP_CPU_S.
- Rows that OUT has are kept, so a run that was cut short goes on.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import TextIO, cast
from zlib import crc32

from mutants.kill_arm import CAP_CPU_S

from kvcheck.core.base.rng import Rng
from kvcheck.core.targets.mutants import MUTANTS, mutant
from kvcheck.core.workload import WORDS

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
COLUMNS = ("mutant", "before", "before_s", "after_s", "before_line", "after_line")
OWN, POLICY = "its own tree", "its policy on this tree"


class Child:
    """An arm in a process of its own. A tree of the past has a folder for temporary files that no other run sweeps
    away; this tree picks its own, in memory, as in a default run."""

    def __init__(self, policy: str, tree: Path, seed: int) -> None:
        self._folder = TemporaryDirectory(prefix="kill-table-")
        place = {} if tree == ROOT else {"TMPDIR": self._folder.name}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE.with_name("kill_arm.py")), policy, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **place, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"},
        )

    def answer(self, text: str) -> Mapping[str, object]:
        """What it says to a line."""
        cast(TextIO, self._process.stdin).write(text + "\n")
        cast(TextIO, self._process.stdin).flush()
        line = cast(TextIO, self._process.stdout).readline()
        if not line:
            raise SystemExit(f"the arm ended with status {self._process.wait()} at {text}")
        return cast(Mapping[str, object], json.loads(line))


def shuffled(seed: int) -> list[str]:
    """The mutants of decoder words, in an order that the seed decides: a run that is cut short has a fair sample."""
    names = [name for name in sorted(MUTANTS) if mutant(name).decoder == WORDS]
    return sorted(names, key=lambda name: Rng(seed * 1_000_003 + crc32(name.encode())).next_u64())


def kept_rows(file: Path, columns: Sequence[str]) -> list[dict[str, str]]:
    """The rows of a table that was cut short; none if there is no file."""
    if not file.exists():
        return []
    with file.open(newline="", encoding="utf-8") as stream:
        reader = csv.DictReader(stream)
        if tuple(reader.fieldnames or ()) not in ((), tuple(columns)):
            raise SystemExit(f"{file}: expected the columns {', '.join(columns)}; name another file")
        return [*reader]


def compared(name: str, rows: Sequence[Mapping[str, str]], cap_s: float, *, digits: int) -> str:
    """A line of markdown: how many both arms find, and how long it takes. cap_s: what counts where nothing is found."""
    took = {arm: [float(each[f"{arm}_s"] or cap_s) for each in rows] for arm in ("before", "after")}
    hits = " / ".join(str(sum(bool(each[f"{arm}_s"]) for each in rows)) for arm in took)
    means, medians = ([of(each) for each in took.values()] for of in (mean, median))
    texts = [f"{before:.{digits}f} to {after:.{digits}f}" for before, after in (means, medians)]
    return f"| {name} | {len(rows)} | {hits} | {texts[0]} | {texts[1]} | {means[1] / means[0]:.2f} |"


def summary(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A line of markdown for each kind of "before", and for all."""
    lines = [
        "| before | mutants | found before / after | mean CPU s | median CPU s | mean, after / before |",
        "|---|---|---|---|---|---|",
    ]
    for kind in (OWN, POLICY, None):
        own = [each for each in rows if kind in (None, each["before"])]
        if not own:
            continue
        lines.append(compared(kind or "all", own, CAP_CPU_S, digits=1))
    return lines


def main() -> None:
    """Write the table, and print its summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=sorted(MUTANTS))
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    arms = (("before", given.before), ("before", ROOT), ("after", ROOT))
    own, policy, after = (Child(name, tree, given.seed) for name, tree in arms)
    rows = kept_rows(given.out, COLUMNS)
    known = {each["mutant"] for each in rows}
    with given.out.open("a", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        if not stream.tell():
            writer.writeheader()
        for name in given.only or shuffled(given.seed):
            if name in known:
                continue
            kind, was = OWN, own.answer(name)
            if not was["known"]:
                kind, was = POLICY, policy.answer(name)
            now = after.answer(name)
            said = (kind, was["seconds"], now["seconds"], was["line"], now["line"])
            rows.append(dict(zip(COLUMNS, (name, *("" if each is None else str(each) for each in said)), strict=True)))
            writer.writerow(rows[-1])
            stream.flush()
    sys.stdout.write("\n".join(summary(rows)) + "\n")


if __name__ == "__main__":
    main()
