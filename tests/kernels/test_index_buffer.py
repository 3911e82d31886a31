"""Index pages: what is written for a token is what its request reads, wherever its page lies, bit for bit.

Invariants:
- Expected bytes come from the documented layout, byte by byte in Python, not from the views of the code under test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.kernels import index_buffer
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

LAYOUTS = (
    IndexLayout(page_size=64, key_words=16, scale_halves=1),  # FP8 keys of 128 bytes: a page has 8448
    IndexLayout(page_size=6, key_words=3, scale_halves=3),
    IndexLayout(page_size=1, key_words=16, scale_halves=2),
)
LENGTHS = ((), (0,), (1,), (64, 0, 130, 1), (5, 6, 7), (0, 0, 65))
FORMS = ("_torch", "")
Form = Callable[..., Any]


def pages_of(lengths: tuple[int, ...], layout: IndexLayout, drawn: random.Random) -> list[list[int]]:
    """Page ids of each request, in any order, no page twice; page 0 is nobody's."""
    counts = [-(-length // layout.page_size) for length in lengths]
    ids = drawn.sample(range(1, sum(counts) + 4), sum(counts))
    return [[ids.pop() for _ in range(count)] for count in counts]


def check_index(suffix: str, *, device: str, ids: torch.dtype, gap: int) -> int:
    """Write every token of some requests, compare the bytes, read them back; returns how many cases."""
    set_index, get_keys, get_scales, get_index = (
        getattr(index_buffer, name + suffix) for name in ("set_index", "get_keys", "get_scales", "get_index")
    )
    for layout in LAYOUTS:
        for lengths in LENGTHS:
            drawn = random.Random(f"{layout}{lengths}")
            owned = pages_of(lengths, layout, drawn)
            count = max((page for pages in owned for page in pages), default=0) + 2
            memory = torch.full((count, layout.page_words + gap), -0x5A5A5A5A5A5A5A5B, device=device)
            rows = memory[:, : layout.page_words]
            tokens = sum(lengths)
            keys = [[drawn.getrandbits(63) for _ in range(layout.key_words)] for _ in range(tokens)]
            scales = [[drawn.getrandbits(31) for _ in range(layout.scale_halves)] for _ in range(tokens)]
            locs = [
                pages[at // layout.page_size] * layout.page_size + at % layout.page_size
                for pages, length in zip(owned, lengths, strict=True)
                for at in range(length)
            ]
            order = drawn.sample(range(tokens), tokens)
            wide = torch.tensor([keys[at] for at in order], dtype=torch.int64).reshape(-1, layout.key_words)
            narrow = torch.tensor([scales[at] for at in order], dtype=torch.int32).reshape(-1, layout.scale_halves)
            where = torch.tensor([locs[at] for at in order], dtype=torch.int64, device=device)
            set_index(rows, where, wide.to(device), narrow.to(device), layout)
            assert memory.cpu().numpy().tobytes() == expected_bytes(layout, count, gap, locs, keys, scales)
            # Ids of pages that a request does not have are far outside: looking them up would fail.
            columns = max(map(len, owned), default=0) + 1
            table = [pages + [1 << 30] * (columns - len(pages)) for pages in owned]
            starts = [sum(lengths[:at]) for at in range(len(lengths) + 1)]
            reads = IndexReads(
                pages=torch.tensor(table, dtype=ids, device=device).reshape(len(lengths), columns),
                starts=torch.tensor(starts, dtype=torch.int64, device=device),
                tokens=tokens,
            )
            both = get_index(rows, reads, layout)
            assert both[0].cpu().tolist() == keys and both[1].cpu().tolist() == scales
            assert both[0].dtype is torch.int64 and both[1].dtype is torch.int32
            assert get_keys(rows, reads, layout).equal(both[0]) and get_scales(rows, reads, layout).equal(both[1])
    return len(LAYOUTS) * len(LENGTHS)


def expected_bytes(
    layout: IndexLayout, count: int, gap: int, locs: list[int], keys: list[list[int]], scales: list[list[int]]
) -> bytes:
    """The memory of `count` pages with those tokens in them."""
    stride, key_bytes, scale_bytes = (layout.page_words + gap) * 8, layout.key_words * 8, layout.scale_halves * 4
    memory = bytearray(b"\xa5" * (stride * count))
    for loc, key, scale in zip(locs, keys, scales, strict=True):
        page, token = divmod(loc, layout.page_size)
        at = page * stride + token * key_bytes
        memory[at : at + key_bytes] = b"".join(word.to_bytes(8, "little") for word in key)
        at = page * stride + layout.page_size * key_bytes + token * scale_bytes
        memory[at : at + scale_bytes] = b"".join(half.to_bytes(4, "little") for half in scale)
    return bytes(memory)


CASES = len(LAYOUTS) * len(LENGTHS)


@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(("ids", "gap"), [(torch.int64, 0), (torch.int32, 3)])
def test_tokens_are_read_as_they_were_written(suffix: str, ids: torch.dtype, gap: int) -> None:
    assert check_index(suffix, device="cpu", ids=ids, gap=gap) == CASES


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernels_mean_what_the_torch_forms_mean() -> None:
    said = interpreted_check(
        """
        import torch
        from kernels.test_index_buffer import check_index
        from kvcheck.kernels import index_buffer_triton as kernels

        calls = []
        for name in ("get_index_triton", "set_index_triton"):
            by_kernel = getattr(kernels, name)
            setattr(kernels, name, lambda *args, by_kernel=by_kernel: (calls.append(args), by_kernel(*args))[1])
        kernels.BLOCK_WORDS = 512
        compared = check_index("", device="cpu", ids=torch.int32, gap=3)
        assert len(calls) == 4 * compared, "the kernels did not run"
        print(compared)
        """
    )
    assert said == [str(CASES)]


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", FORMS)
@pytest.mark.parametrize(("ids", "gap"), [(torch.int64, 0), (torch.int32, 3)])
def test_a_device_reads_and_writes_like_the_host(suffix: str, ids: torch.dtype, gap: int) -> None:
    assert check_index(suffix, device="cuda", ids=ids, gap=gap) == CASES


def test_what_does_not_fit_the_layout_is_refused() -> None:
    layout = LAYOUTS[0]
    reads = IndexReads(pages=torch.zeros(1, 1, dtype=torch.int64), starts=torch.tensor([0, 1]), tokens=1)
    for rows in (torch.zeros(2, 1055, dtype=torch.int64), torch.zeros(2, 1056), torch.zeros(1056, 2).long().t()):
        with pytest.raises(AssertionError, match=r"rows are int64|side by side"):
            index_buffer.get_index(rows, reads, layout)
    with pytest.raises(AssertionError, match="whole words"):
        IndexLayout(page_size=3, key_words=1, scale_halves=1)
    with pytest.raises(AssertionError, match=r"starts \[B \+ 1\]"):
        IndexReads(pages=torch.zeros(2, 1, dtype=torch.int64), starts=torch.tensor([0, 1]), tokens=1)
