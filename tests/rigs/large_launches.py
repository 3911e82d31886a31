"""Launches that no interpreted test makes: too large there, or with a clock."""

from __future__ import annotations

from rigs.launches import Launch

INT64 = "*int64:16"
COPY = "kvcheck.kernels.page_copy_triton:_copy_words"
HOLD = (INT64, INT64, "1", "i64:16", "i32")
HOLD_CONSTANTS = {"HAS_CLOCK": True, "num_warps": 1, "enable_fp_fusion": False}
FAR = {"TARGET_R": 64, "SOURCE_R": 64, "BLOCK": 1024, "enable_fp_fusion": False}


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
}
