"""Runtime: what LMCache is told before its first object is made.

Invariants:
- Nothing that is judged is changed.
"""

from __future__ import annotations

import logging

from kvcheck.core.probes.frame.names import Names


def prepare(names: Names) -> None:
    """A full allocator warns at every eviction; that is no news where every schedule fills it."""
    logging.disable(logging.WARNING)
