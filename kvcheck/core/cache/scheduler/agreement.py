"""RankGroup: what the ranks of one end know, reduced to what all of them know.

Invariants:
- The least value counts, place by place, so one rank's failure or delay is everybody's.
- Ranks that bring different numbers of values have diverged already, and that is an error.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.errors import LengthMismatch


class RankGroup:
    """Ranks in one process."""

    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each rank, the values that all agreed on. (mutant: rank-decides-alone)"""
        if len({len(values) for values in known}) > 1:
            raise LengthMismatch(f"ranks bring {[len(values) for values in known]} values; expected equally many")
        least = [min(values) for values in zip(*known, strict=True)]
        return [list(least) for _ in known]
