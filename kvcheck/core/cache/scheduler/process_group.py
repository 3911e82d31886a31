"""ProcessRanks: the RankGroup of ranks in processes of their own, over torch.distributed's gloo.

Invariants:
- Lengths are compared before values, so ranks that have diverged raise.
- Every wait has a bound. A rank that dies or stays away raises GroupLost in all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from kvcheck.core.base.errors import LengthMismatch

LOCAL = "127.0.0.1"


class RankGroup:
    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """Element-wise minimum, for each rank. Raise LengthMismatch if lengths differ. (mutant: rank-decides-alone)"""
        if len({len(values) for values in known}) > 1:
            raise LengthMismatch(f"ranks bring {[len(values) for values in known]} values; expected equally many")
        least = [min(values) for values in zip(*known, strict=True)]
        return [list(least) for _ in known]


class GroupLost(Exception):
    pass


class ProcessRanks(RankGroup):
    """meeting: a file for the rendezvous, of this run alone."""

    def __init__(self, meeting: str, rank: int, ranks: int, *, timeout_s: float) -> None:
        gloo: Any = dist.ProcessGroupGloo  # the public call takes its address from the environment
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=LOCAL)]
        options._timeout = timedelta(seconds=timeout_s)
        try:
            self._group = gloo(FileStore(meeting, ranks), rank, ranks, options)
        except RuntimeError as error:
            raise GroupLost(f"{ranks} ranks did not meet in {timeout_s} s: {_short(error)}") from error
        self._ranks = ranks

    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """known: of this rank alone. Raise GroupLost."""
        (own,) = known
        if self._ranks == 1:
            return [list(own)]
        shortest, longest = self._least([len(own), -len(own)])
        if shortest != -longest:
            raise LengthMismatch(f"ranks bring from {shortest} to {-longest} values; expected equally many")
        return [self._least(own) if own else []]

    def _least(self, values: Sequence[int]) -> list[int]:
        tensor = torch.tensor(values, dtype=torch.int64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        try:
            self._group.allreduce([tensor], options).wait()
        except RuntimeError as error:
            raise GroupLost(_short(error)) from error
        least: list[int] = tensor.tolist()
        return least


def _short(error: RuntimeError) -> str:
    return str(error).splitlines()[0][:200]
