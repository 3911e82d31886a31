"""Rows gathered and scattered on all layers at once: every word lands where its id says."""

from __future__ import annotations

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.kernels import page_copy

PACKED = ((3, 7, 5), (1, 4, 1), (2, 3, 259))  # [L, R, W]
ROWS = ([], [3], [2, 0, 3, 1], [6, 1, 4, 0])
Devices = tuple[str, str]


def check_packed_rows(suffix: str, devices: Devices) -> int:
    """Gather from and scatter into strided memory, packed memory on the other side; returns how many cases."""
    gather, scatter = (getattr(page_copy, name + suffix) for name in ("gather_rows", "scatter_rows"))
    compared = 0
    for layers, rows, words in PACKED:
        for ids in ROWS:
            chosen = [row % rows for row in ids]
            chosen = list(dict.fromkeys(chosen))
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
    """Wait for what was queued on a device."""
    if "cuda" in devices:
        torch.cuda.synchronize()


PACKED_CASES = len(PACKED) * len(ROWS)


@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_rows_are_gathered_and_scattered_on_every_layer(suffix: str) -> None:
    assert check_packed_rows(suffix, ("cpu", "cpu")) == PACKED_CASES


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernels_mean_what_the_torch_forms_mean() -> None:
    said = interpreted_check(
        """
        from kernels.test_packed_rows import check_packed_rows
        from kvcheck.kernels import page_copy_triton as kernels

        calls = []
        for name in ("gather_rows_triton", "scatter_rows_triton"):
            by_kernel = getattr(kernels, name)
            setattr(kernels, name, lambda *args, by_kernel=by_kernel: (calls.append(args), by_kernel(*args)))
        kernels.BLOCK_WORDS = 128
        packed = check_packed_rows("", ("cpu", "cpu"))
        assert len(calls) == 2 * packed, "the kernels did not run"
        print(packed)
        """
    )
    assert said == [str(PACKED_CASES)]


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", ["_torch", ""])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "pinned"), ("pinned", "cuda")])
def test_rows_cross_between_the_device_and_pinned_memory(suffix: str, devices: Devices) -> None:
    if suffix == "_torch" and devices[0] == "pinned":
        pytest.skip("the torch forms pick rows where the pool is, which is the device")
    assert check_packed_rows(suffix, devices) == PACKED_CASES
