"""How many examples a property gets that needs more, or can afford fewer, than the profile gives."""

from __future__ import annotations

from hypothesis import settings

WHOLE = 50
"""Examples that the profile of `make test` gives a property that states none."""
FEWEST = 2


def examples(count: int) -> settings:
    """So many in `make test`."""
    return settings(max_examples=max(FEWEST, count * settings().max_examples // WHOLE))
