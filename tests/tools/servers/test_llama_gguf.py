"""A known-answer model as a GGUF file: what is read back from its bytes, and that the rotation stays the same."""

from __future__ import annotations

from typing import Any

import torch

from tools.servers.llama_gguf import neighbouring_pairs


def test_scores_are_the_same_under_either_rotation() -> None:
    generator = torch.Generator().manual_seed(1)
    dim, heads = 8, 3
    query, key = (torch.randn(heads * dim, 5, generator=generator) for _ in range(2))
    seen = torch.randn(5, 2, generator=generator)  # the input at two positions
    angles = torch.tensor([1.0, 0.3, 0.1, 0.02])

    def score(rotate: Any, *, paired: bool) -> torch.Tensor:
        rows = [neighbouring_pairs(each, head_dim=dim) if paired else each for each in (query, key)]
        first, second = (
            rotate((each @ seen[:, at]).view(heads, dim), position)
            for each, at, position in ((rows[0], 0, 7), (rows[1], 1, 3))
        )
        return (first * second).sum(-1)

    def halves(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, :4], x[:, 4:], ((position * angles).cos(), (position * angles).sin())
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def neighbours(x: torch.Tensor, position: int) -> torch.Tensor:
        a, b, (cos, sin) = x[:, 0::2], x[:, 1::2], ((position * angles).cos(), (position * angles).sin())
        return torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(1)

    expected = score(halves, paired=False)
    assert torch.allclose(score(neighbours, paired=True), expected, rtol=1e-5)
    assert not torch.allclose(score(neighbours, paired=False), expected, rtol=1e-2)
