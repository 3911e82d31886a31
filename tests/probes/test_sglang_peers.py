"""What surrounds an engine's two sides of a transfer: the link, and ranks that meet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcheck.core.probes.sglang.agreement import FakeProcessGroup, is_mismatch
from kvcheck.core.probes.sglang.rig.pd_pair import PREFILL, StandInLink, session


def test_late_bytes_land_in_order_when_told_and_what_is_not_registered_is_refused() -> None:
    source, target = np.arange(32, dtype=np.uint8), np.zeros(32, dtype=np.uint8)
    here, there = source.ctypes.data, target.ctypes.data
    link = StandInLink(lambda address: address >= there + 8)
    link.register(PREFILL, [here], [32])
    link.register(session(0), [there], [16])
    assert link.batch_transfer_sync(session(0), [here, here + 8], [there, there + 8], [8, 4]) == 0
    assert link.batch_transfer_sync(session(0), [here + 20], [there + 12], [4]) == 0
    assert target[:16].tolist() == [*range(8), *[0] * 8]
    source[8:12] = 99  # what is sent is what was there when it was sent
    link.land(session(0), 1)
    assert target[8:16].tolist() == [8, 9, 10, 11, 0, 0, 0, 0]
    link.land(session(0))
    assert target[12:16].tolist() == [20, 21, 22, 23]
    assert link.batch_transfer_sync(session(0), [here], [there + 12], [8]) == -1
    assert link.batch_transfer_sync(session(1), [here], [there], [8]) == -1
    assert (link.refused, link.moved_bytes) == (2, 16)


def reduced(values: list[int]) -> Callable[[], list[int]]:
    def call() -> list[int]:
        tensor = torch.tensor(values)
        torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MIN)
        kept: list[int] = tensor.tolist()
        return kept

    return call


def test_ranks_reduce_together() -> None:
    group = FakeProcessGroup(2)
    assert group.together([reduced([4, 3]), reduced([2, 4])], "") == [[2, 3], [2, 3]]
    assert group.collectives == 1


@pytest.mark.parametrize("other", [reduced([1]), list], ids=["another number", "no call"])
def test_a_rank_whose_peer_does_something_else_is_told(other: Callable[[], list[int]]) -> None:
    first, second = FakeProcessGroup(2).together([reduced([4, 3]), other], "")
    assert is_mismatch(first)
    assert is_mismatch(second) or second == []
