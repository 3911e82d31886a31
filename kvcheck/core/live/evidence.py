"""What must have happened at a server for a pass to count: kinds of evidence, where each is read, and requirements.

Invariants:
- A count is None where nothing says it, never 0.
- What an engine says of each judged request comes before counters, and counters count only by how they moved between
  two readings. A counter that does not exist before its first event counts as 0 then.
"""

from __future__ import annotations

from kvcheck.core.base.evidence_kinds import KINDS, Kind

__all__ = ["KINDS", "Kind"]
