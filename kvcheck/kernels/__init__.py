"""Tensor operations: the torch meaning of each, and a fast form beside it; they import nothing of the package."""
