"""The digest of rows where they lie is the digest of those rows gathered, in every form and for every list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_numba, needs_triton

from kvcheck.kernels.digest import digest_torch, start_of
from kvcheck.kernels.digest_rows import digest_rows, digest_rows_torch

Form = Callable[..., torch.Tensor]
LISTS = ([], [4], [0, 1, 2, 3], [9, 3, 3, 0], [7, 6, 5, 1, 2, 8])


def by_numba(source: torch.Tensor, rows: torch.Tensor, *, key: int) -> torch.Tensor:
    """The compiled form, whatever the size; it is for words side by side."""
    from kvcheck.kernels.digest_numba import digest_rows_numba

    return digest_rows_numba(source if source.stride(2) == 1 else source.contiguous(), rows, start_of(key, 0))


def check_digest_rows(form: Form = digest_rows, device: str = "cpu") -> int:
    """`form` against gathering, for whole rows, parts of them, strided words and layers; how many were compared."""
    compared = 0
    for layers, wide in ((1, 1), (3, 7), (2, 1031)):
        generator = torch.Generator().manual_seed(wide)
        whole = torch.randint(-(1 << 62), 1 << 62, (layers, 10, wide * 2), generator=generator)
        whole[:, ::3] = 0
        for source in (whole, whole[:, :, wide:], whole[:, :, ::2], whole[:1, 1:]):
            for rows in LISTS:
                ids = torch.tensor([row % source.shape[1] for row in rows], dtype=torch.int64)
                expected = digest_torch(source[:, ids].reshape(-1), key=wide)
                found = form(source.to(device), ids.to(device), key=wide).cpu()
                assert (found.shape, found.dtype, int(found)) == ((), torch.int64, int(expected)), (wide, rows)
                compared += 1
    return compared


@pytest.mark.parametrize(
    ("form", "device"),
    [
        *((form, "cpu") for form in (digest_rows_torch, digest_rows)),
        pytest.param(by_numba, "cpu", marks=[needs_numba, pytest.mark.compiled]),
        *(pytest.param(form, "cuda", marks=pytest.mark.gpu) for form in (digest_rows_torch, digest_rows)),
    ],
)
def test_every_form_means_the_digest_of_gathered_rows(form: Form, device: str) -> None:
    assert check_digest_rows(form, device) == 60


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernel_means_the_digest_of_gathered_rows() -> None:
    ran = interpreted_check("kernels.test_digest_rows:check_digest_rows", "digest_rows_triton:partial_digests_triton")
    assert ran == [60, 60]


@pytest.mark.parametrize("row", [-1, 4])
def test_a_row_that_is_not_there_is_refused(row: int) -> None:
    with pytest.raises(IndexError, match="expected rows of 0 to 3, got"):
        digest_rows(torch.zeros((1, 4, 2), dtype=torch.int64), torch.tensor([1, row]), key=0)
