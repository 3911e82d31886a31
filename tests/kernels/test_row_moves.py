"""Rows gathered, scattered and moved on all layers at once: every word lands where its id says, overlapping or not.

Invariants:
- What is expected is worked out row by row on Python lists that are copied before anything is written.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from kernels.test_page_copy import ORDERS, paged
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.kernels import page_copy

PACKED = ((3, 7, 5), (1, 4, 1), (2, 3, 259))  # [L, R, W]
ROWS = ([], [3], [2, 0, 3, 1], [6, 1, 4, 0])
SHAPES = ((2, 5, 4, 3), (1, 20, 1, 130), (3, 10, 2, 1))  # [L, U, r, W], 20 rows each
MOVES = {  # target row: source row
    "nothing": {},
    "itself": {4: 4},
    "swap": {1: 2, 2: 1},
    "chain": {row + 1: row for row in range(12)},
    "chain back": {row: row + 1 for row in reversed(range(12))},
    "rotation": {(row + 7) % 20: row for row in range(20)},
    "fan out": {0: 9, 9: 9, 5: 9, 19: 9, 1: 0},
}
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


def check_moves(suffix: str, device: str, orders: Iterable[str] = ORDERS) -> int:
    """Move lists that overlap in every way, in several layouts of memory; returns how many cases."""
    compared = 0
    move = getattr(page_copy, "move_rows" + suffix)
    for shape in SHAPES:
        for order in (ORDERS[name] for name in orders):
            for pairs in MOVES.values():
                buffer = paged(shape, order, 7, device=device)
                before = buffer.tolist()
                lists = (torch.tensor([*side], dtype=torch.int64, device=device) for side in (pairs, pairs.values()))
                move(buffer, *lists)
                expected = [[[*map(list, unit)] for unit in layer] for layer in before]
                for to, at in pairs.items():
                    for layer in range(shape[0]):
                        expected[layer][to // shape[2]][to % shape[2]] = before[layer][at // shape[2]][at % shape[2]]
                assert buffer.tolist() == expected, (shape, order, pairs)
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
MOVE_CASES = len(SHAPES) * len(ORDERS) * len(MOVES)


@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_rows_are_gathered_and_scattered_on_every_layer(suffix: str) -> None:
    assert check_packed_rows(suffix, ("cpu", "cpu")) == PACKED_CASES


@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_overlapping_lists_move_as_if_all_were_read_first(suffix: str) -> None:
    assert check_moves(suffix, "cpu") == MOVE_CASES


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernels_mean_what_the_torch_forms_mean() -> None:
    said = interpreted_check(
        """
        from kernels.test_row_moves import check_moves, check_packed_rows
        from kvcheck.kernels import page_copy_triton as kernels

        calls = []
        for name in ("gather_rows_triton", "scatter_rows_triton", "move_rows_triton"):
            by_kernel = getattr(kernels, name)
            setattr(kernels, name, lambda *args, by_kernel=by_kernel: (calls.append(args), by_kernel(*args)))
        kernels.BLOCK_WORDS = 128
        kernels.MOVED_WORDS = 64
        packed = check_packed_rows("", ("cpu", "cpu"))
        moved = check_moves("", "cpu", ["layer-first", "page-first"])
        kernels.MOVED_ROWS = 3  # most lists are too long for one launch now
        moved += check_moves("", "cpu", ["page-first-direct"])
        assert len(calls) == 2 * packed + moved, "the kernels did not run"
        print(packed, moved)
        """
    )
    assert said == [str(PACKED_CASES), str(MOVE_CASES)]


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", ["_torch", ""])
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("cuda", "pinned"), ("pinned", "cuda")])
def test_rows_cross_between_the_device_and_pinned_memory(suffix: str, devices: Devices) -> None:
    if suffix == "_torch" and devices[0] == "pinned":
        pytest.skip("the torch forms pick rows where the pool is, which is the device")
    assert check_packed_rows(suffix, devices) == PACKED_CASES


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", ["_torch", ""])
def test_a_device_moves_like_the_host(suffix: str) -> None:
    assert check_moves(suffix, "cuda") == MOVE_CASES


@pytest.mark.gpu
@pytest.mark.parametrize("count", [64, 700, 5000])
def test_long_overlapping_lists_move_right_on_a_device(count: int) -> None:
    buffer = torch.randint(1 << 60, (4, 8192, 1, 144), device="cuda")
    generator = torch.Generator().manual_seed(count)
    target, source = (torch.randperm(8192, generator=generator)[:count].cuda() for _ in range(2))
    expected = buffer.clone()
    page_copy.move_rows_torch(expected, target, source)
    for _ in range(20):
        moved = buffer.clone()
        page_copy.move_rows(moved, target, source)
        assert moved.equal(expected)
