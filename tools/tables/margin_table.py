"""How far the right token of a known-answer model leads the next one, by size and dtype: a table.

    PYTHONPATH=tests python -m tools.tables.margin_table OUT.csv --sizes shapes
    PYTHONPATH=tests python -m tools.tables.margin_table OUT.csv --sizes long

Each model answers a walk and a position test that fill its length but for the tokens of the answer. Weights are those
of the folder, in its dtype; the tests' own forward pass runs them, for fp8-kv with queries in FP8 as well as keys and
values. The answer's tokens are fed back and judged at once.

Invariants:
- A walk has as many places as the prompt has room for, less the few that would share a factor with its hops.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from itertools import product
from math import gcd
from pathlib import Path

import pandas
import torch
from rigs.known_answers import forward, margins, marks, walk
from rigs.llama_forward import as_fp8

from kvcheck.core.model.alphabet import Alphabet
from kvcheck.core.model.answers import answers
from kvcheck.core.model.family import fit_digits
from kvcheck.core.model.llama import content_room
from kvcheck.core.model.parameters import Parameters
from tools.tables.measured import append

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8-kv": torch.bfloat16}
COLUMNS = (
    *("layers", "kv_heads", "group", "head_dim", "length", "dtype", "digits", "base"),
    *("test", "prompt", "judged", "wrong", "margin", "cpu_seconds"),
)
HEADER_AND_ENDS = 4  # tokens of a walk's prompt that are no place of their own
SHORT, LONG = 512, 32768


def sized(layers: int, kv_heads: int, group: int, head_dim: int, length: int, dtype: str) -> Parameters:
    """The model that `kvcheck model make` writes with these options, with as many nodes as its length has tokens."""
    digits, base = fit_digits(nodes=length, kv_heads=kv_heads, room=content_room(head_dim, length))
    return Parameters(
        family="llama",
        layers=layers,
        kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        length=length,
        dtype=dtype,
        nodes=length,
        digits=digits,
        base=base,
        distance=min(256, length // 4),
    )


def shapes() -> Iterator[Parameters]:
    """Layers, groups and head dimensions against each other; every dtype; many KV heads."""
    for layers, group, head_dim, dtype in product((8, 32, 64), (1, 4, 8), (64, 128), ("bf16", "fp8-kv")):
        yield sized(layers, 2, group, head_dim, SHORT, dtype)
    for group, head_dim, dtype in product((1, 4, 8), (64, 128), ("fp16", "fp32")):
        yield sized(8, 2, group, head_dim, SHORT, dtype)
    for kv_heads, dtype in product((8, 16, 29), DTYPES):
        yield sized(4, kv_heads, 1, 128, SHORT, dtype)
    for dtype in ("bf16", "fp32", "fp8-kv"):
        yield sized(4, 64, 1, 256, SHORT, dtype)


def long() -> Iterator[Parameters]:
    yield sized(8, 8, 1, 128, LONG, "bf16")
    yield sized(32, 2, 4, 64, LONG, "bf16")
    yield sized(64, 2, 1, 64, LONG, "bf16")
    yield sized(8, 8, 1, 128, LONG, "fp8-kv")
    yield sized(8, 2, 1, 64, LONG, "fp16")
    yield sized(8, 2, 1, 64, LONG, "fp32")
    yield sized(64, 2, 1, 64, LONG, "fp8-kv")
    yield sized(64, 8, 1, 128, LONG, "bf16")


SIZES = {"shapes": shapes, "long": long}


def rows(parameters: Parameters, tokens: int) -> Iterator[dict[str, object]]:
    narrow = parameters.dtype == "fp8-kv"
    model = forward(parameters, DTYPES[parameters.dtype], as_fp8 if narrow else None)
    model.rounds_queries = narrow
    places = parameters.length - tokens - HEADER_AND_ENDS
    while gcd(places, parameters.hops) != 1:
        places -= 1
    for test, request in (
        ("walk", walk(parameters, count=places)),
        ("position", marks(parameters, count=parameters.length - tokens - 2)),
    ):
        start = time.process_time()
        leads = margins(model, request, answers(Alphabet(parameters), request, tokens))
        own = {name: getattr(parameters, name) for name in COLUMNS[:8]}
        yield own | {
            "test": test,
            "prompt": len(request),
            "judged": len(leads),
            "wrong": int((~(leads > 0)).sum()),
            "margin": round(float(leads.min()), 2),
            "cpu_seconds": round(time.process_time() - start, 1),
        }


def summary(measured: pandas.DataFrame) -> list[str]:
    """A row of markdown for each length, dtype and test: what was measured, and the smallest margin of it."""
    lines = []
    for group, rows_of in measured.groupby(["length", "dtype", "test"], sort=False):
        spread = (
            ", ".join(map(str, sorted(set(rows_of[name])))) for name in ("layers", "kv_heads", "group", "head_dim")
        )
        counts = (rows_of["judged"].sum(), rows_of["wrong"].sum(), f"{rows_of['margin'].min():.2f}")
        lines.append("| " + " | ".join(map(str, (*group, *spread, *counts))) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sizes", choices=SIZES, default="shapes")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with torch.inference_mode():
        for parameters in SIZES[given.sizes]():
            for row in rows(parameters, given.tokens):
                append(given.out, COLUMNS, [row])
                sys.stdout.write(", ".join(f"{name} {value}" for name, value in row.items()) + "\n")
                sys.stdout.flush()
    sys.stdout.write("\n".join(summary(pandas.read_csv(given.out))) + "\n")


if __name__ == "__main__":
    main()
