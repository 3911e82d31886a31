"""Fields of packed rows: every output holds the bytes of its field, and they are its own.

Invariants:
- The table of the product is tested, and one of odd widths; rows are random bytes, NaN bits included.
"""

from __future__ import annotations

import random

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.core.cache.transfer.metadata import metadata_fields
from kvcheck.kernels import metadata_row

ODD = ((0, 3, torch.int32), (12, 1, torch.int64), (20, 0, torch.float32), (24, 1030, torch.float32))  # offset, values
SLOTS = ([], [2], [3, 0, 3, 1])


def fields_of_the_product() -> tuple[tuple[int, int, torch.dtype], ...]:
    """The ten fields of a narrow model."""
    return tuple((field.offset, field.width, field.dtype) for field in metadata_fields(50))


def check_split(suffix: str, device: str) -> int:
    """Split rows of every table by every list of slots; returns how many outputs were compared."""
    split = getattr(metadata_row, "split_rows" + suffix)
    compared = 0
    for table in (fields_of_the_product(), ODD):
        size = max(offset + values * dtype.itemsize for offset, values, dtype in table)
        held = random.Random(size).randbytes(4 * (size + 8))
        memory = torch.frombuffer(bytearray(held), dtype=torch.uint8).clone().to(device).view(4, -1)
        for slots in SLOTS:
            outputs = [torch.empty((len(slots), values), dtype=dtype, device=device) for _, values, dtype in table]
            ids = torch.tensor(slots, dtype=torch.int64, device=device)
            split(outputs, memory[:, :size], ids, offsets=[offset for offset, _, _ in table])
            for output, (offset, values, dtype) in zip(outputs, table, strict=True):
                found = output.view(torch.uint8).cpu().tolist() if values else [[] for _ in slots]
                starts = [slot * (size + 8) + offset for slot in slots]
                assert found == [[*held[start : start + values * dtype.itemsize]] for start in starts]
                compared += 1
    return compared


COMPARED = len(SLOTS) * (10 + len(ODD))


@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_every_field_gets_its_bytes(suffix: str) -> None:
    assert check_split(suffix, "cpu") == COMPARED


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_what_the_torch_form_means() -> None:
    said = interpreted_check(
        """
        from kernels.test_metadata_row import check_split
        from kvcheck.kernels import metadata_row_triton as kernels

        calls = []
        by_kernel = kernels.split_rows_triton
        kernels.split_rows_triton = lambda *args: (calls.append(args), by_kernel(*args))
        compared = check_split("", "cpu")
        assert len(calls) == 6, "the kernel did not run"
        print(compared)
        """
    )
    assert said == [str(COMPARED)]


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_a_device_splits_like_the_host(suffix: str) -> None:
    assert check_split(suffix, "cuda") == COMPARED


def test_fields_outside_the_row_or_off_the_grid_are_refused() -> None:
    rows, slots = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    for values, offset in ((5, 0), (1, 2), (4, 4)):
        with pytest.raises(AssertionError, match="a field is whole"):
            metadata_row.split_rows([torch.zeros(1, values)], rows, slots, offsets=[offset])
    with pytest.raises(AssertionError, match="an offset a field"):
        metadata_row.split_rows([torch.zeros(1, 1)], rows, slots, offsets=[])
