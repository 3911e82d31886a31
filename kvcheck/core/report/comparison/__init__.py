"""Comparison: several runs on one page, releases by bugs."""
