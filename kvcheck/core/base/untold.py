"""Why a finding has no story, from its record alone, so that all readers of a record give the same reason."""

from __future__ import annotations

from kvcheck.core.base.cells import STREAMED, is_engine, is_of_server, keys_of
from kvcheck.core.base.record import Finding

IN_ONE_PROCESS = (None, "loopback")
OUTSIDE = {
    "audit": "the audit compares memory with footprints, which no event of the history shows",
}


def why_untold(finding: Finding) -> str | None:
    """Why no schedule can be run again for the finding's story; None if one can."""
    keys = keys_of(finding.schedule)
    if is_of_server(finding.schedule):
        return "nobody sees inside a running server; run.json has the request, its answer and the server's own report"
    if not finding.schedule:
        return "it is of no one schedule"
    if is_engine(keys.get("target", "")):
        return "an installed engine is not observed operation by operation"
    if keys.get("transport") not in IN_ONE_PROCESS:
        return "the ranks were processes of their own, whose order nobody recorded"
    if keys.get("backend") in STREAMED:
        return "a device picks its own order, which is another one each time"
    if finding.oracle in OUTSIDE:
        return OUTSIDE[finding.oracle]
    if finding.page is None and finding.request is None:
        return "it names neither a page nor a request that could be followed"
    return None
