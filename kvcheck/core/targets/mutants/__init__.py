"""Mutants: each puts one historical bug, or half of its fix, back into the fixed implementation."""

from __future__ import annotations

from kvcheck.core.targets.mutants.mutant import Mutant
from kvcheck.core.targets.mutants.retract_resume import RETRACT_RESUME

MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in RETRACT_RESUME}
