"""KV pools in plain torch, as people write them, for tests of kvcheck.testing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcheck.testing import IntegrityError, Judged, check_round_trip

SLOTS = 61
SEEDS = range(6)


class Pool:
    def __init__(self, dtype: torch.dtype = torch.bfloat16, slots: int = SLOTS) -> None:
        self.k = [torch.zeros(slots, 2, 8, dtype=dtype) for _ in range(2)]
        self.v = [torch.zeros(slots, 2, 8, dtype=dtype) for _ in range(2)]
        self.k_scale = [torch.zeros(slots, 2) for _ in range(2)]

    def buffers(self) -> list[torch.Tensor]:
        return [*self.k, *self.v, *self.k_scale]

    def save(self, ids: Any) -> Any:
        return [each[ids] for each in self.buffers()]

    def load(self, copy: Any, ids: Any) -> None:
        for each, rows in zip(self.buffers(), copy, strict=True):
            each[ids] = rows


def judged(pool: Any, **options: Any) -> Judged:
    return check_round_trip(pool, **{"save": pool.save, "load": pool.load, "slots": SLOTS} | options)


def found(pool: Any, **options: Any) -> IntegrityError:
    """What a call that has to find something raises."""
    with pytest.raises(IntegrityError) as caught:
        judged(pool, **options)
    return caught.value


class PagedWithoutIndex(Pool):
    """16 tokens a page; index keys have a row a page, which load leaves out."""

    def __init__(self) -> None:
        self.latent = torch.zeros(2, 13, 16, 6)
        self.index_k = [torch.zeros(13, 40, dtype=torch.uint8) for _ in range(2)]

    def save(self, ids: Any) -> Any:
        pages = ids[::16] // 16
        return self.latent[:, pages], [each[pages] for each in self.index_k]

    def load(self, copy: Any, ids: Any) -> None:
        self.latent[:, ids[::16] // 16] = copy[0]


class Paged(PagedWithoutIndex):
    def load(self, copy: Any, ids: Any) -> None:
        super().load(copy, ids)
        for each, rows in zip(self.index_k, copy[1], strict=True):
            each[ids[::16] // 16] = rows
