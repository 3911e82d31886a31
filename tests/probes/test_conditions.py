"""What an engine may do: findings that need an assumption outside its contract say it, and what harms nobody is none.

Invariants:
- The assumption stands in the finding; a finding of the same code that needs none stands beside it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes.engine import put_fault
from probes.test_sglang_probes import first_bad

from kvcheck.core.probes.frame.engine_process import EngineProcess

# fault, shape, codes under no assumption, codes under one.
CONDITIONS = [
    ("pages-last", "agreement.everything", set(), {"KV203"}),
    ("room-kept", "agreement.everything", {"KV203"}, {"KV203"}),  # metadata of before, and pages of before
    ("state-trims", "state-lengths.nsa-shorter", set(), {"KV102", "KV301"}),
    ("state-dies", "state-lengths.nsa-longer", {"KV902"}, set()),
]


@pytest.mark.processes
@pytest.mark.parametrize(("fault", "shape", "sure", "conditional"), CONDITIONS)
def test_what_needs_an_assumption_says_which(
    child: EngineProcess, fake: Path, fault: str, shape: str, sure: set[str], conditional: set[str]
) -> None:
    put_fault(fake, fault)
    found = first_bad(child, shape).findings
    assert {each.code for each in found if each.condition is None} == sure
    assert {each.code for each in found if each.condition is not None} == conditional


@pytest.mark.processes
def test_lists_on_the_device_harm_no_direct_copy(child: EngineProcess, fake: Path) -> None:
    put_fault(fake, "lists-on-device")
    for shape in ("index-moves.hybrid-direct", "index-moves.tree-direct", "index-moves.mamba-tree-direct"):
        reply = first_bad(child, shape)
        assert (reply.findings, reply.unknown) == ((), None) and reply.evidence.words_verified
