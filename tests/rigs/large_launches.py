"""Launches that no interpreted test makes: too large or too slow there, or with a clock. And what is not launched.

Invariants:
- A launch that the product gives to the torch form on a device is refused by the compiler for it.
"""

from __future__ import annotations

import torch
from rigs.launches import Launch

from kvcheck.kernels.attention import multiplies_on

INT64, E4M3 = "*int64:16", "*float8_e4m3fn:16"
COPY = "kvcheck.kernels.page_copy_triton:_copy_words"
ATTEND = "kvcheck.kernels.attention_triton:_attend"
SCORES = "kvcheck.kernels.attention_triton:_score_page"
HOLD = (INT64, INT64, "1", "i64:16", "i32")
HOLD_CONSTANTS = {"HAS_CLOCK": True, "num_warps": 1, "enable_fp_fusion": False}
FAR = {"TARGET_R": 64, "SOURCE_R": 64, "BLOCK": 1024, "enable_fp_fusion": False}


def attention(kind: str, *, dim: int, value_dim: int) -> Launch:
    """Attention in the sizes that models have."""
    rest = dim - value_dim
    sizes = {"COUNT": 2048, "D": dim, "V": value_dim, "HEADS": 16, "V_BLOCK": value_dim, "REST": rest, "H_BLOCK": 16}
    constants = {**sizes, "BLOCK": 32, "IS_WIDE": False, "num_warps": 8}
    return (
        ATTEND,
        (f"*{kind}:16", f"*{kind}:16", INT64, "*float32:16", "fp32", "i32:16", "1"),
        tuple(sorted(constants.items())),
    )


# What no interpreted test launches, because it would be too large or too slow there, or needs a clock.
LARGE: dict[str, Launch] = {
    "hold-with-clock": ("kvcheck.kernels.hold_triton:_wait_for_flag", HOLD, tuple(sorted(HOLD_CONSTANTS.items()))),
    **{
        f"copy-{words}": (
            COPY,
            (INT64, INT64, INT64, INT64, "i32:16", "i64:16", "i32:16", "i32:16", "i64:16", "i32:16", "i32:16"),
            tuple(sorted({**FAR, "W": words}.items())),
        )
        for words in (144, 1056)
    },
    **{
        f"attend-{kind}-{dim}": attention(kind, dim=dim, value_dim=value_dim)
        for kind in ("bfloat16", "float16", "float32")
        for dim, value_dim in ((576, 512), (128, 128))
    },
    "attend-e4m3-576": attention("float8_e4m3fn", dim=576, value_dim=512),
}


def is_refused(launch: Launch, capability: int) -> bool:
    """The product takes the torch form on such a device."""
    name, kinds, _ = launch
    return name in (ATTEND, SCORES) and E4M3 in kinds and not multiplies_on(torch.float8_e4m3fn, divmod(capability, 10))
