"""Names of kvcheck's pytest marker and fixtures.

Invariants:
- Imports pytest alone.
"""

from __future__ import annotations

import pytest

MARKER = "kvcheck_schedules"
SEED = "kvcheck_seed"
FIXTURES = ("kvcheck_pool", "kvcheck_streams", SEED)


def asks(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker(MARKER) is not None or any(name in names for name in FIXTURES)
