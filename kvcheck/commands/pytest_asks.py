"""What a test asks for: pytest's marker and fixtures of kvcheck, by their names.

Invariants:
- Imports pytest alone.
"""

from __future__ import annotations

import pytest

MARKER = "kvcheck_schedules"
SEED = "kvcheck_seed"
FIXTURES = ("kvcheck_pool", "kvcheck_streams", SEED)


def asks(item: pytest.Item) -> bool:
    """Whether a test asks for kvcheck by its marker or a fixture."""
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker(MARKER) is not None or any(name in names for name in FIXTURES)
