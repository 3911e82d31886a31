"""Seeds of a run: a range "A-B", and every N-th of it, a shard "I/N"."""

from __future__ import annotations

import re

from kvcheck.core.base.errors import UsageError

MOST_SEEDS = 1_000_000
_SEEDS = re.compile("(0|[1-9][0-9]{0,17})-(0|[1-9][0-9]{0,17})")
_SHARD = re.compile("([1-9][0-9]{0,6})/([1-9][0-9]{0,6})")


def parse_seeds(text: str) -> range:
    """The seeds of "A-B", both included. Raises UsageError."""
    found = _SEEDS.fullmatch(text)
    if found is not None and 0 <= int(found[2]) - int(found[1]) < MOST_SEEDS:
        return range(int(found[1]), int(found[2]) + 1)
    raise UsageError(
        f"--seeds: expected the first and the last, such as 1-100, at most {MOST_SEEDS:,} seeds; got {text[:40]!r}"
    )


def parse_shard(text: str | None, seeds: range) -> range:
    """The seeds of the shard "I/N": every N-th one, from the I-th on. None: all seeds. Raises UsageError."""
    if text is None:
        return seeds
    found = _SHARD.fullmatch(text)
    if found is None or not int(found[1]) <= int(found[2]) <= len(seeds):
        raise UsageError(
            f"--shard: expected I/N with I from 1 to N, such as 1/4, and N at most the number of seeds, which is "
            f"{len(seeds):,}; got {text[:40]!r}"
        )
    return seeds[int(found[1]) - 1 :: int(found[2])]
