"""Tensor operations: each has a torch form, which defines its result, and a fast form. They import nothing of kvcheck.

Invariants:
- A fast form has the arguments of its torch form and gives the same bits, unless the torch form states a tolerance.
- Importing these modules loads neither triton nor numba, except for modules with these names.
"""

from __future__ import annotations

from typing import Final

# The torch form: the function that chooses the fastest form.
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
