"""Seeds and shards: each seed is in one shard, and what is no range or share is refused."""

from __future__ import annotations

import itertools

import pytest

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.seeds import parse_seeds, parse_shard


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shards_share_the_seeds_out(count: int) -> None:
    seeds = parse_seeds("5-9")
    shares = [[*parse_shard(f"{number}/{count}", seeds)] for number in range(1, count + 1)]
    assert sorted(itertools.chain.from_iterable(shares)) == [5, 6, 7, 8, 9]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    assert parse_shard(None, seeds) == seeds


@pytest.mark.parametrize(
    "text", ["", "7", "0-", "9-5", "x", "-1", "1-10000000", "1.5-2", "01-2", "1-2-3", "1-٣", "1-2 "]
)
def test_bad_seeds_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--seeds: expected"):
        parse_seeds(text)


@pytest.mark.parametrize("text", ["", "0/2", "3/2", "1", "1/0", "1/6", "a/b", "1/2/3"])
def test_bad_shards_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--shard: expected"):
        parse_shard(text, range(1, 6))
