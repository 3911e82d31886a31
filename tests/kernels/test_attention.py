"""Index scores, top-k and sparse attention: exact where the module says so, within its stated tolerance elsewhere.

Invariants:
- References are worked out in float64 or in Python integers; tolerances are computed from the documented rules.
"""

from __future__ import annotations

import math
import random
from functools import partial
from typing import Any

import pytest
import torch
from rigs.interpreted import interpreted_check, needs_triton

from kvcheck.kernels import attention
from kvcheck.kernels.index_buffer import set_index_torch
from kvcheck.kernels.index_layout import IndexLayout, IndexReads

SCORES = (  # layout, heads, tokens of each request
    (IndexLayout(page_size=64, key_words=16, scale_halves=1), 3, (65, 0, 7)),
    (IndexLayout(page_size=6, key_words=1, scale_halves=1), 17, (1, 13)),
)
TOP_K = (  # k, tokens of each request
    (4, (9, 0, 4, 3, 1)),
    (1, (40,)),
    (33, (32, 33, 34, 100)),
)
ATTENTION = (  # heads, dim, value_dim, tokens of each request, columns
    (5, 24, 16, (3, 0, 40), 40),
    (17, 16, 16, (33, 1), 35),
)
FEW = (0.0, -0.0, 1.5, -1.5, math.inf, -math.inf, 1e-40, -1e-40, 3e38)
ULP = 2.0**-22


def drawn_floats(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Floats of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * 2.0 ** torch.randint(-6, 6, shape, generator=generator)


def check_scores(suffix: str, device: str) -> int:
    """Whole numbers exactly, other FP8 values within the bound; returns how many comparisons."""
    scores_of = getattr(attention, "index_scores" + suffix)
    compared = 0
    for layout, heads, lengths in SCORES:
        dim, tokens = layout.key_words * 8, sum(lengths)
        drawn = random.Random(dim)
        counts = [-(-length // layout.page_size) for length in lengths]
        ids = drawn.sample(range(1, sum(counts) + 3), sum(counts))
        table = [[ids.pop() for _ in range(count)] + [1 << 30] * (max(counts) - count) for count in counts]
        size = layout.page_size
        places = [
            pages[at // size] * size + at % size
            for pages, length in zip(table, lengths, strict=True)
            for at in range(length)
        ]
        starts = torch.tensor([sum(lengths[:at]) for at in range(len(lengths) + 1)])
        for is_whole in (True, False):
            keys, queries = drawn_floats((tokens, dim), 1), drawn_floats((len(lengths), heads, dim), 2)
            weights, scales = drawn_floats((len(lengths), heads), 3), drawn_floats((tokens, 1), 4).abs()
            if is_whole:
                keys, queries, weights = (each.clamp(-9, 9).round() for each in (keys, queries, weights))
                scales = 2.0 ** scales.log2().round()
            keys, queries = keys.to(torch.float8_e4m3fn), queries.to(torch.float8_e4m3fn)
            rows = torch.full((max(counts) * len(counts) + 4, layout.page_words + 1), -1)[:, : layout.page_words]
            set_index_torch(rows, torch.tensor(places), keys.view(torch.int64), scales.view(torch.int32), layout)
            reads = IndexReads(pages=torch.tensor(table, device=device), starts=starts.to(device), tokens=tokens)
            memory = rows if device == "cpu" else rows.to(device)
            found = scores_of(queries.to(device), weights.to(device), memory, reads, layout).cpu()
            request = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
            products = queries.double()[request] * keys.double()[:, None]
            expected = (weights.double()[request] * products.sum(-1).clamp_min(0)).sum(-1) * scales.double()[:, 0]
            bound = (weights.double()[request].abs() * products.abs().sum(-1)).sum(-1) * scales.double()[:, 0]
            bound *= 0 if is_whole else (dim + heads + 4) * ULP
            assert ((found.double() - expected).abs() <= bound).all(), (layout, is_whole)
            assert found.abs().sum() > 0
            compared += 1
    return compared


def check_top_k(suffix: str, device: str) -> int:
    """Many equal scores, both zeros and infinities; returns how many requests."""
    pick = getattr(attention, "top_k" + suffix)
    compared = 0
    for k, lengths in TOP_K:
        drawn = random.Random(k)
        for kind in ("few", "normal", "equal"):
            draw = {
                "few": partial(drawn.choice, FEW),
                "normal": partial(drawn.gauss, 0, 1),
                "equal": partial(float, 2),
            }[kind]
            scores = [[draw() for _ in range(length)] for length in lengths]
            flat = torch.tensor([score for row in scores for score in row], dtype=torch.float32, device=device)
            starts = torch.tensor([sum(lengths[:at]) for at in range(len(lengths) + 1)], device=device)
            best = pick(flat, starts, k)
            assert best.dtype is torch.int64
            for row, found in zip(flat.cpu().split(lengths), best.tolist(), strict=True):
                order = sorted(range(len(row)), key=lambda at: (-float(row[at]), at))[:k]
                assert found == sorted(order) + [-1] * (k - len(order))
                compared += 1
    return compared


def check_attention(suffix: str, device: str) -> int:
    """Every type of rows against float64 within the bound; returns how many requests."""
    attend = getattr(attention, "sparse_attention" + suffix)
    compared = 0
    for heads, dim, value_dim, lengths, columns in ATTENTION:
        drawn = random.Random(heads)
        for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)):
            rows, queries = drawn_floats((50, dim), 5).to(dtype), drawn_floats((len(lengths), heads, dim), 6).to(dtype)
            table = [drawn.sample(range(50), length) + [-1] * (columns - length) for length in lengths]
            locs = torch.tensor(table, device=device)
            found = attend(queries.to(device), rows.to(device), locs, value_dim=value_dim, scale=0.05).cpu()
            assert found.dtype is torch.float32 and found.shape == (len(lengths), heads, value_dim)
            for request, length in enumerate(lengths):
                if not length:
                    assert not found[request].any()
                    continue
                seen, asked = rows[table[request][:length]].double(), queries[request].double()
                expected = (asked @ seen.T * 0.05).softmax(-1) @ seen[:, :value_dim]
                logit = (dim + 2) * ULP * 0.05 * (asked.abs() @ seen.abs().T).max()
                bound = (math.expm1(2 * float(logit)) + rounding + (length + 4) * ULP) * seen.abs().max()
                assert (found[request].double() - expected).abs().max() <= bound, (dtype, request)
                compared += 1
    return compared


CHECKS = {"scores": (check_scores, 4), "top_k": (check_top_k, 30), "attention": (check_attention, 12)}


@pytest.mark.parametrize("suffix", ["_torch", ""])
@pytest.mark.parametrize("check", CHECKS)
def test_a_form_keeps_to_the_reference(check: str, suffix: str) -> None:
    run, cases = CHECKS[check]
    assert run(suffix, "cpu") == cases


@pytest.mark.compiled
@needs_triton
def test_the_triton_kernels_keep_to_the_reference() -> None:
    said = interpreted_check(
        """
        from kernels.test_attention import CHECKS
        from kvcheck.kernels import attention_triton as kernels

        calls = []
        for name in ("index_scores_triton", "top_k_triton", "sparse_attention_triton"):
            by_kernel = getattr(kernels, name)
            setattr(kernels, name, lambda *args, by_kernel=by_kernel: (calls.append(args), by_kernel(*args))[1])
        kernels.BLOCK_SCORES = 16
        for check, _ in CHECKS.values():
            before = len(calls)
            print(check("", "cpu"))
            assert len(calls) > before, "the kernel did not run"
        """
    )
    assert said == [str(cases) for _, cases in CHECKS.values()]


@pytest.mark.gpu
@pytest.mark.parametrize("suffix", ["_torch", ""])
@pytest.mark.parametrize("check", CHECKS)
def test_a_device_keeps_to_the_reference(check: str, suffix: str) -> None:
    run, cases = CHECKS[check]
    assert run(suffix, "cuda") == cases


def test_operands_that_do_not_fit_are_refused() -> None:
    layout = IndexLayout(page_size=2, key_words=2, scale_halves=1)
    reads = IndexReads(pages=torch.zeros(1, 1, dtype=torch.int64), starts=torch.tensor([0, 1]), tokens=1)
    rows, weights = torch.zeros(2, layout.page_words, dtype=torch.int64), torch.zeros(1, 3)
    for queries in (torch.zeros(1, 3, 16), torch.zeros(1, 3, 8).to(torch.float8_e4m3fn)):
        with pytest.raises(AssertionError, match="FP8"):
            attention.index_scores(queries, weights, rows, reads, layout)
    with pytest.raises(AssertionError, match="fp32 scores"):
        attention.top_k(torch.zeros(3), torch.tensor([0, 3]), 0)
    locs: Any = torch.zeros(1, 1, dtype=torch.int64)
    for value_dim in (0, 9):
        with pytest.raises(AssertionError, match="values of"):
            attention.sparse_attention(torch.zeros(1, 2, 8), torch.zeros(3, 8), locs, value_dim=value_dim, scale=1.0)
