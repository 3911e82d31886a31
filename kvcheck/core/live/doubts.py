"""Answers that may not be the engine's own: a response cache gives right answers that no KV cache was read for.

Invariants:
- A doubt accuses nobody: it makes a round UNKNOWN.
- Only answers that came to their end are looked at: an aborted one may say less.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.live.exchange import End, Exchange


def doubts(exchanges: Sequence[Exchange]) -> list[str]:
    """Why answers of a round may come from something else than the engine; none where nothing speaks for it."""
    done = [each for each in exchanges if each.answer.end is End.DONE]
    found = []
    foreign = [each for each in done if each.answer.rid is not None and each.sending.rid not in each.answer.rid]
    if foreign:
        number = foreign[0].sending.question.number
        found.append(
            f"{len(foreign)} answers came under the name of another request, the first for request {number}: they may "
            "come from a response cache; ask the engine itself"
        )
    silent = [each for each in done if each.answer.cached is None]
    if silent and len(silent) < len(done):
        number = silent[0].sending.question.number
        found.append(
            f"{len(silent)} answers do not say how many tokens were cached, and others do, the first for request "
            f"{number}: they may come from a response cache; ask the engine itself"
        )
    return found
