"""CTRF (ctrf.io), the JSON that dashboards of CI read: a test for each cell, with its causes as message and trace.

Invariants:
- UNKNOWN is "other" and never passed or skipped. A case accepted by a baseline is "skipped".
- Times are in milliseconds, `start` and `stop` since 1970.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime

from kvcheck.core.base.record import Verdict
from kvcheck.core.report.ci.outcome import Case, CiOutcome, writer
from kvcheck.core.report.markdown import printable

SPEC = "0.0.0"
"""The version of CTRF's schema, whose first release is still to come."""
STATUSES = ("passed", "failed", "pending", "skipped", "other")
STATUS = {Verdict.PASS: "passed", Verdict.FAIL: "failed", Verdict.UNKNOWN: "other"}


def render(outcome: CiOutcome) -> str:
    tests = [_test(case) for case in outcome.cases]
    start = _milliseconds(outcome.started_at)
    counts = {status: sum(test["status"] == status for test in tests) for status in STATUSES}
    summary = {"tests": len(tests), **counts, "start": start, "stop": start + round(1000 * outcome.duration_s)}
    facts = {"verdict": outcome.verdict, "exit_code": outcome.exit_code, "complete": outcome.is_complete}
    results = {
        "tool": {"name": "kvcheck", "version": outcome.version},
        "summary": summary,
        "tests": tests,
        "extra": {**facts, **{name: printable(value) for name, value in outcome.facts.items()}},
    }
    document = {"reportFormat": "CTRF", "specVersion": SPEC, "generatedBy": outcome.name, "results": results}
    return json.dumps(document, indent=1) + "\n"


def _test(case: Case) -> dict[str, object]:
    is_accepted = case.let_pass is not None and case.verdict is Verdict.PASS
    first, *_ = case.troubles or (None,)
    return {
        "name": printable(case.id),
        "status": "skipped" if is_accepted else STATUS[case.verdict],
        "duration": round(1000 * max(0.0, case.duration_s)),
        "suite": [printable(case.group)],
        "message": printable(case.let_pass or "" if first is None else f"{first.head}: {first.message}"),
        "trace": printable("\n\n".join("\n".join(each.lines) for each in case.troubles), keep="\n"),
        "extra": {"evidence": [printable(each) for each in case.details]},
    }


def _milliseconds(moment: str | None) -> int:
    """Return 0 for a time that is not known."""
    try:
        then = datetime.fromisoformat(moment or "")
    except ValueError:
        return 0
    return round(1000 * (then if then.tzinfo else then.replace(tzinfo=UTC)).timestamp())


write = writer("ctrf", render)
