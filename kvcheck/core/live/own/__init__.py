"""A user's own checkpoint, judged on a running server against the server's own cold answers.

Invariants:
- No answer is known beforehand: what a verdict rests on is what the same server said without reuse.
"""
