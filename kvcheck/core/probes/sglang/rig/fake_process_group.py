"""Fake process group: the ranks of an engine as threads of one process, with an all-reduce between them.

A call ends when every rank has made it or has ended. A rank that waits for an ended rank, or brings a different shape,
gets CollectiveMismatch. A real group would hang.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvcheck.core.probes.frame.guard import CannotDrive, Fault, attempt
from kvcheck.core.probes.frame.stubs import replaced


class CollectiveMismatch(Exception):
    pass


class FakeProcessGroup:
    def __init__(self, size: int) -> None:
        self._size = size
        self._moved = threading.Condition()
        self._brought: dict[int, torch.Tensor] = {}
        self._left: set[int] = set()
        self._rounds = 0
        self._result: torch.Tensor | None = None
        self._rank = threading.local()
        self.collectives = 0

    def together(self, calls: Sequence[Callable[[], Any]], package: str) -> list[Any]:
        """Run one call on each rank. Returns each result, or the Fault that ended the call."""
        self._brought, self._left = {}, set()
        results: list[Any] = [None] * self._size
        missed: list[CannotDrive] = []

        def run(rank: int) -> None:
            self._rank.number = rank
            try:
                results[rank] = attempt(calls[rank], package)
            except CannotDrive as why:
                missed.append(why)
            finally:
                self._leave(rank)

        own = {"all_reduce": self._all_reduce, "get_world_size": lambda *_: self._size}
        with replaced(torch.distributed, own):
            threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self._size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if missed:
            raise missed[0]
        return results

    def _all_reduce(self, tensor: torch.Tensor, op: Any = torch.distributed.ReduceOp.SUM, **_: object) -> None:
        rank = self._rank.number
        reduce = {torch.distributed.ReduceOp.MIN: torch.amin, torch.distributed.ReduceOp.MAX: torch.amax}.get(op)
        if reduce is None:
            raise CannotDrive(f"an all-reduce of {op}, which the ranks here do not know")
        with self._moved:
            round_ = self._rounds
            self._brought[rank] = tensor.clone()
            if len(self._brought) + len(self._left) == self._size:
                self._close(reduce)
            while self._rounds == round_:
                self._moved.wait()
            if self._result is None:
                raise CollectiveMismatch("the ranks bring different numbers of requests, or one does not take part")
            tensor.copy_(self._result)

    def _leave(self, rank: int) -> None:
        with self._moved:
            self._left.add(rank)
            if self._brought and len(self._brought) + len(self._left) == self._size:
                self._close(torch.amin)

    def _close(self, reduce: Callable[..., torch.Tensor]) -> None:
        """The caller holds the lock."""
        tensors = [self._brought[rank] for rank in sorted(self._brought)]
        same = len(tensors) == self._size and len({tuple(each.shape) for each in tensors}) == 1
        self._result = reduce(torch.stack(tensors), dim=0) if same else None
        self._brought = {}
        self._rounds += 1
        self.collectives += 1
        self._moved.notify_all()


def is_mismatch(result: object) -> bool:
    return isinstance(result, Fault) and result.text.startswith(CollectiveMismatch.__name__)
