"""What attention is told of a request: literal positions, lengths and windows, and rows of 8 bits with their scales."""

from __future__ import annotations

import pytest
import torch

from kvcheck.core.cache.pools.attention import AttentionInputs
from kvcheck.core.cache.pools.pool import Holding
from kvcheck.core.stress.targets.mutants import mutant
from kvcheck.core.stress.workload.shapes import shape

TOLD = AttentionInputs(shape("gpt-oss-tiny"))  # a window of 10
HOLDING = Holding(request=1, row=1)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (8, 0), (9, 0), (10, 1), (25, 16)])
def test_a_window_ends_with_the_token_itself(position: int, first: int) -> None:
    assert TOLD.first_seen(position) == first
    assert position - first < 10


def test_a_chunk_goes_on_where_its_rows_lie_and_reads_itself() -> None:
    assert TOLD.position(HOLDING, 7) == 7
    assert [TOLD.length(0, 1), TOLD.length(7, 8), TOLD.length(4, 12)] == [1, 8, 12]


def test_each_value_has_its_own_scale() -> None:
    rows, scales = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), torch.tensor([[[0.5], [2.0]]])
    assert TOLD.scaled(rows, scales).tolist() == [[[0.5, 1.0], [6.0, 8.0]]]


def test_mutants_differ_where_their_cards_say_and_nowhere_else() -> None:
    def told(name: str) -> AttentionInputs:
        return mutant(name).parts.attention(shape("gpt-oss-tiny"))

    short, long, twice, shifted = (
        told(name)
        for name in ("window-one-short", "length-without-own-token", "scale-applied-twice", "resume-shifts-positions")
    )
    assert [short.first_seen(at) for at in (0, 8, 9, 10)] == [0, 0, 1, 2]
    assert [long.length(*chunk) for chunk in ((0, 1), (7, 8), (4, 12))] == [1, 7, 12]
    assert twice.scaled(torch.ones(1, 1, 1), torch.full((1, 1, 1), 0.5)).item() == 0.25
    again = Holding(request=1, row=2)
    assert [shifted.position(each, 7) for each in (HOLDING, HOLDING, again)] == [7, 7, 8]
