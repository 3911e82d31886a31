"""Checks that are left out: nothing goes wrong in a run whose callers are all right, until one is not.

Invariants:
- Each subclass removes one check of the fix and restates nothing else.
"""

from __future__ import annotations

from dataclasses import replace

from kvcheck.core.base.paging import IndexArray
from kvcheck.core.cache.transfer.metadata import MetadataBuffers
from kvcheck.core.targets.mutants.mutant import Mutant
from kvcheck.core.targets.parts import FIXED


class UncheckedRelease(MetadataBuffers):
    """A slot is released by whoever names it."""

    def _check_released(self, ids: IndexArray, request: int) -> None:
        """Nothing is looked at."""


CHECKS = (
    Mutant(
        name="metadata-release-unchecked",
        bug="c",
        parts=replace(FIXED, metadata=UncheckedRelease),
        scenario="pd-transfer",
        shape="llama-3-tiny",
        killed_by="liveness",
        code="KV308",
        shows="A metadata slot is cleared and freed for a request that has not leased it.",
        matters="A late or repeated release takes the row from the request that has the slot now, and nothing says so.",
        example="a hazard of the same family",
    ),
)
