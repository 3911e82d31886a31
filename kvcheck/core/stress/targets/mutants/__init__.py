"""Mutants: each puts one historical bug, or half of its fix, back into the fixed implementation.

Invariants:
- A subclass changes one line of the fix, or the reaction to one situation, and restates nothing else.
"""

from __future__ import annotations

from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.registry import unknown_name
from kvcheck.core.stress.targets.builtin import BuiltinTarget
from kvcheck.core.stress.targets.mutants.attention import ATTENTION
from kvcheck.core.stress.targets.mutants.disturbed import DISTURBED
from kvcheck.core.stress.targets.mutants.hicache import HICACHE
from kvcheck.core.stress.targets.mutants.late import LATE
from kvcheck.core.stress.targets.mutants.mutant import Mutant
from kvcheck.core.stress.targets.mutants.pd_transfer import PD_TRANSFER
from kvcheck.core.stress.targets.mutants.reports import REPORTS
from kvcheck.core.stress.targets.mutants.retract_resume import RETRACT_RESUME
from kvcheck.core.stress.targets.mutants.situations import SITUATIONS
from kvcheck.core.stress.targets.mutants.state_pairs import STATE_PAIRS

ROWS = (
    *LATE,
    *REPORTS,
    *RETRACT_RESUME,
    *HICACHE,
    *SITUATIONS,
    *STATE_PAIRS,
    *PD_TRANSFER,
    *DISTURBED,
    *ATTENTION,
)
MUTANTS: dict[str, Mutant] = {mutant.name: mutant for mutant in ROWS}


def mutant(name: str) -> Mutant:
    """The mutant of that name. Raises UsageError for an unknown one."""
    if name not in MUTANTS:
        raise UsageError(unknown_name("mutant", name, MUTANTS, listed_by="kvcheck list mutants"))
    return MUTANTS[name]


def mutant_target(name: str) -> BuiltinTarget:
    return BuiltinTarget(mutant(name).parts)
