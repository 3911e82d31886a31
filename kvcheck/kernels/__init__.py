"""Tensor operations: each has a torch form, which defines its result, and a fast form.

Invariants:
- A fast form has the arguments of its torch form and gives the same bits, unless the torch form states a tolerance.
- Only modules with triton or numba in their name load these libraries when imported.
"""
