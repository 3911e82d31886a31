"""What is said of a name that nobody knows: the known names, and the nearest of them.

Invariants:
- Case does not count for nearness; a name that differs in case alone is near.
- A long list is not printed: the command that lists it is named instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection

LISTED_NAMES = 20  # names that one line of a terminal still shows


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a message that names the known name nearest to `name`; "" if none is near."""
    folded = {each.casefold(): each for each in known}
    near = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


def unknown_name(kind: str, name: str, known: Collection[str], *, listed_by: str | None = None) -> str:
    """The message for a name that is not known.

    kind: what it should be a name of, such as "shape". listed_by: the command that prints all names, for long lists.
    """
    hint = did_you_mean(name, known)
    if listed_by is not None and len(known) > LISTED_NAMES:
        return f"unknown {kind} {name!r}: expected one of {len(known)} names{hint}; see {listed_by}"
    return f"unknown {kind} {name!r}; known: {', '.join(known)}{hint}"
