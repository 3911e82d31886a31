"""Workloads: model shapes, request traces, synthetic requests, events, and the decoder that writes and checks content.

Invariants:
- Importing the package imports none of its modules.
- A workload is a pure function of its file and its integers (capacity, page size, seed): no clock, no global
  randomness, no built-in hash.
"""
