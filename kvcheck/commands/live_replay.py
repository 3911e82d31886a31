"""`kvcheck replay` of lines of a running server: the same requests again, and the rate of failure.

Invariants:
- The first requests are the line's. Later ones make the same situation in other words, since the server may have cached
  the first.
- A server is not deterministic: a line that does not fail again is UNKNOWN and never fixed.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections import Counter
from pathlib import Path

from kvcheck.commands.replayed import Replayed
from kvcheck.commands.server import Server, known_answers
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, Verdict
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.live.line import LivePlan, OwnPlan
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.live.runner import LiveRunner, RoundResult
from kvcheck.core.model.alphabet import Alphabet

NOT_DETERMINISTIC = "a server is not deterministic: only its requests are the same, not what it does when"


def replay_live(plan: LivePlan, times: int, server: Server) -> Replayed:
    """Send the requests of a line again. Raises UsageError."""
    folder = Path(plan.known_answers)
    if not folder.is_absolute() and not folder.exists():
        raise UsageError(
            f"the line names the model by known-answers={folder}, and here is no such folder; replay it in the "
            "folder where the run was started, or write the whole path into the line"
        )
    known = known_answers(folder)
    client = _at(server, plan).client(known)
    served = server.describe(client)
    results: list[RoundResult] = []
    for attempt in range(times):
        runner = LiveRunner(
            client,
            Alphabet(known.parameters),
            timeout_s=server.timeout_s,
            is_replay=attempt == 0,
            is_balanced=bool(server.metrics),
        )
        runner.begin(served, names=secrets.randbelow(1 << 32))
        names = plan.names if attempt == 0 else secrets.randbelow(1 << 32)
        results.append(runner.run(dataclasses.replace(plan, names=names, admin=int(bool(plan.admin) and server.admin))))
        if results[-1].is_over:
            break
    return _told(plan, results, is_forced=server.admin or not plan.admin)


def replay_own(plan: OwnPlan, times: int, server: Server) -> Replayed:
    """Send the requests of a line of an own model again. Raises UsageError."""
    client = _at(server, plan).client(None)
    served = server.describe(client)
    results: list[RoundResult] = []
    for attempt in range(times):
        runner = OwnRunner(
            client, vocabulary=plan.vocabulary, rounds=times, requests=plan.requests, timeout_s=server.timeout_s
        )
        runner.begin(served, names=secrets.randbelow(1 << 32))
        names = plan.names if attempt == 0 else secrets.randbelow(1 << 32)
        results.append(runner.run(dataclasses.replace(plan, names=names, admin=int(bool(plan.admin) and server.admin))))
        if results[-1].is_over:
            break
    return _told(plan, results, is_forced=server.admin or not plan.admin)


def _at(server: Server, plan: LivePlan | OwnPlan) -> Server:
    return dataclasses.replace(server, url=plan.target, decode=plan.decode, api=plan.engine)


def _told(plan: RoundPlan, results: list[RoundResult], *, is_forced: bool) -> Replayed:
    failed = [result for result in results if result.findings]
    notes = [f"   {NOT_DETERMINISTIC}"]
    if not is_forced:
        notes.append("   retractions on demand were left out: they need --admin here too")
    if failed:
        first = failed[0].findings[0]
        codes = Counter(found.code for result in failed for found in _first_of_each(result.findings))
        each_code = ", ".join(f"{code} {count}" for code, count in sorted(codes.items()))
        lines = [
            f" STILL FAILS {len(failed)}/{len(results)}  {plan.cell}: {first.code} {first.message}",
            f"   runs with each code: {each_code}",
            *notes,
        ]
        return Replayed(Verdict.FAIL, _agreed(results), lines)
    judged = sum(result.evidence.observed.get("token", 0) for result in results)
    reasons = list(dict.fromkeys(reason for result in results for reason in result.reasons))
    why = f"; {reasons[0]}" if reasons else ""
    lines = [
        f" NOT REPRODUCED 0/{len(results)}  {plan.cell}: {counted(judged, 'token')} judged, none wrong{why}",
        *notes,
    ]
    return Replayed(Verdict.UNKNOWN, _agreed(results), lines)


def _first_of_each(findings: tuple[Finding, ...]) -> list[Finding]:
    return list({found.code: found for found in reversed(findings)}.values())


def _agreed(results: list[RoundResult]) -> int:
    return sum(bool(result.findings) == bool(results[0].findings) for result in results)
