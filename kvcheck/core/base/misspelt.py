"""Messages for unknown names: the known names, or the command that lists them, and the nearest ones."""

from __future__ import annotations

import difflib
from collections.abc import Collection

LISTED_NAMES = 20  # names that one line of a terminal still shows
LEAST_START, MOST_NEAR = 3, 3
"""Least length of a prefix that suggests names, and most names suggested."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """End a message with the nearest known name, or those that begin with `name`; "" if none is near."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    if not near and len(name) >= LEAST_START:
        near = [each for each in folded if each.startswith(name.casefold())][:MOST_NEAR]
    return f"; did you mean {' or '.join(repr(folded[each]) for each in near)}?" if near else ""


def unknown_name(kind: str, name: str, known: Collection[str], *, listed_by: str | None = None) -> str:
    """Write the message for an unknown name.

    kind: of the name, such as "shape". listed_by: the command that prints all names, for long lists.
    """
    hint = did_you_mean(name, known)
    if listed_by is not None and len(known) > LISTED_NAMES:
        return f"unknown {kind} {name!r}: expected one of {len(known)} names{hint}; see {listed_by}"
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"
