"""Rows gathered and scattered on all layers at once: every word lands where its id says."""

from __future__ import annotations

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.kernels import page_copy

PACKED = ((3, 7, 5), (1, 4, 1), (2, 3, 259))  # [L, R, W]
ROWS = ([], [3], [2, 0, 3, 1], [6, 1, 4, 0])
Devices = tuple[str, str]


def check_packed_rows(suffix: str = "", devices: Devices = ("cpu", "cpu")) -> int:
    """Gather from and scatter into strided memory, packed memory on the other side; returns how many cases."""
    gather, scatter = (getattr(page_copy, name + suffix) for name in ("gather_rows", "scatter_rows"))
    compared = 0
    for layers, rows, words in PACKED:
        for ids in ROWS:
            chosen = list(dict.fromkeys(row % rows for row in ids))
            pool = place(torch.arange(layers * rows * 2 * words).view(layers, rows, 2 * words), devices[0])[..., :words]
            packed = place(
                torch.arange(layers * len(chosen) * words).view(layers, len(chosen), words) + (1 << 50), devices[1]
            )
            before, kept = pool.tolist(), packed.tolist()
            index = torch.tensor(chosen, dtype=torch.int64, device="cuda" if "cuda" in devices else "cpu")
            scatter(pool, packed, index)
            join(devices)
            expected = [[[*row] for row in layer] for layer in before]
            for at, row in enumerate(chosen):
                for layer in range(layers):
                    expected[layer][row] = kept[layer][at]
            assert pool.tolist() == expected and packed.tolist() == kept
            packed.zero_()
            gather(packed, pool, index)
            join(devices)
            assert packed.tolist() == kept and pool.tolist() == expected
            compared += 1
    return compared


def place(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """A tensor of its own there; "pinned" is host memory that the device reaches."""
    return tensor.clone().pin_memory() if device == "pinned" else tensor.clone().to(device)


def join(devices: Devices) -> None:
    if "cuda" in devices:
        torch.cuda.synchronize()


PACKED_CASES = len(PACKED) * len(ROWS)


GPU = (
    *((suffix, ("cuda", each)) for suffix in ("_torch", "") for each in ("cuda", "pinned")),
    ("", ("pinned", "cuda")),
)
"""Not ("pinned", "cuda") of the torch forms: they pick rows where the pool is, which is the device."""


@pytest.mark.parametrize(
    ("suffix", "devices"),
    [
        *((suffix, ("cpu", "cpu")) for suffix in ("_torch", "")),
        *(pytest.param(*each, marks=pytest.mark.gpu) for each in GPU),
    ],
)
def test_rows_are_gathered_and_scattered_on_every_layer(suffix: str, devices: Devices) -> None:
    assert check_packed_rows(suffix, devices) == PACKED_CASES


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernels_mean_what_the_torch_forms_mean() -> None:
    kernels = [f"page_copy_triton:{name}_rows_triton" for name in ("gather", "scatter")]
    settings = {"page_copy_triton:BLOCK_WORDS": 128}
    ran = interpreted_check("kernels.test_packed_rows:check_packed_rows", *kernels, settings=settings)
    assert ran == [PACKED_CASES, 2 * PACKED_CASES]
