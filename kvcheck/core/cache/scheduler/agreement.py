"""RankGroup: the minimum of the ranks' values, so one rank's failure or delay counts for all."""

from __future__ import annotations

from collections.abc import Sequence

from kvcheck.core.base.errors import LengthMismatch


class RankGroup:
    def agree(self, known: Sequence[Sequence[int]]) -> list[list[int]]:
        """The element-wise minimum, for each rank. Raise LengthMismatch if the ranks have diverged. (mutant:
        rank-decides-alone)"""
        if len({len(values) for values in known}) > 1:
            raise LengthMismatch(f"ranks bring {[len(values) for values in known]} values; expected equally many")
        least = [min(values) for values in zip(*known, strict=True)]
        return [list(least) for _ in known]
