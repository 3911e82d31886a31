"""Tensor operations: the torch meaning of each, and a fast form beside it; they import nothing of the package.

Invariants:
- A fast form is called like its meaning and gives its result to the bit, except where the meaning states a tolerance.
- Importing any of these modules loads neither triton nor numba, except those that are named after them.
"""

from __future__ import annotations

from typing import Final

# The torch meaning: what chooses the fastest form of it.
KERNELS: Final[dict[str, str]] = {
    "kvcheck.kernels.attention:index_scores_torch": "kvcheck.kernels.attention:index_scores",
    "kvcheck.kernels.attention:sparse_attention_torch": "kvcheck.kernels.attention:sparse_attention",
    "kvcheck.kernels.attention:top_k_torch": "kvcheck.kernels.attention:top_k",
    "kvcheck.kernels.content:differing_torch": "kvcheck.kernels.content_rows:differing",
    "kvcheck.kernels.content_rows:fill_torch": "kvcheck.kernels.content_rows:fill",
    "kvcheck.kernels.content_rows:verify_torch": "kvcheck.kernels.content_rows:verify",
    "kvcheck.kernels.digest:digest_torch": "kvcheck.kernels.digest:digest",
    "kvcheck.kernels.digest_rows:digest_rows_torch": "kvcheck.kernels.digest_rows:digest_rows",
    "kvcheck.kernels.hold:hold_torch": "kvcheck.kernels.hold:hold",
    "kvcheck.kernels.index_buffer:get_index_torch": "kvcheck.kernels.index_buffer:get_index",
    "kvcheck.kernels.index_buffer:get_keys_torch": "kvcheck.kernels.index_buffer:get_keys",
    "kvcheck.kernels.index_buffer:get_scales_torch": "kvcheck.kernels.index_buffer:get_scales",
    "kvcheck.kernels.index_buffer:set_index_torch": "kvcheck.kernels.index_buffer:set_index",
    "kvcheck.kernels.metadata_row:split_rows_torch": "kvcheck.kernels.metadata_row:split_rows",
    "kvcheck.kernels.page_copy:copy_rows_torch": "kvcheck.kernels.page_copy:copy_rows",
    "kvcheck.kernels.page_copy:gather_rows_torch": "kvcheck.kernels.page_copy:gather_rows",
    "kvcheck.kernels.page_copy:move_rows_torch": "kvcheck.kernels.page_copy:move_rows",
    "kvcheck.kernels.page_copy:scatter_rows_torch": "kvcheck.kernels.page_copy:scatter_rows",
}
