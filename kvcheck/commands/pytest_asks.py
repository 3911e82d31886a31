"""Names that both halves of kvcheck's pytest plugin use.

Invariants:
- Imports pytest alone.
"""

from __future__ import annotations

import pytest

MARKER = "kvcheck_schedules"
SEED = "kvcheck_seed"
FIXTURES = ("kvcheck_pool", "kvcheck_streams", SEED)
JUDGED = "kvcheck_judged"
"""The attribute of a test's report that carries its outcome, as plain JSON, from a worker to the process that waits."""


def asks(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker(MARKER) is not None or any(name in names for name in FIXTURES)
