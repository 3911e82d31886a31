"""Tensor operations: each has a torch form, which defines its result, and a fast form. They import nothing of kvcheck.

Invariants:
- A fast form has the arguments of its torch form and gives the same bits, unless the torch form states a tolerance.
- Importing these modules loads neither triton nor numba, except for modules with these names.
"""
