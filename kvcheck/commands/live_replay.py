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
from typing import TYPE_CHECKING

from kvcheck.commands.held import Replayed
from kvcheck.commands.server import Server, known_answers
from kvcheck.core.base.errors import UsageError
from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding, Verdict
from kvcheck.core.live.conclusion import RoundPlan
from kvcheck.core.live.line import LivePlan, OwnPlan
from kvcheck.core.live.own.runner import OwnRunner
from kvcheck.core.live.runner import LiveRunner, RoundResult
from kvcheck.core.model.alphabet import Alphabet

if TYPE_CHECKING:
    from kvcheck.core.model.folder import KnownAnswers

NOT_DETERMINISTIC = "a server is not deterministic: only its requests are the same, not what it does when"


def replay_sent(plan: LivePlan | OwnPlan, times: int, server: Server) -> Replayed:
    """Send the requests of a line again. Raises UsageError."""
    known = None if isinstance(plan, OwnPlan) else _model(Path(plan.known_answers))
    client = dataclasses.replace(server, url=plan.target, decode=plan.decode, api=plan.engine).client(known)
    served, timeout_s = server.describe(client), server.timeout_s
    results: list[RoundResult] = []
    for attempt in range(times):
        names = plan.names if attempt == 0 else secrets.randbelow(1 << 32)
        sent = dataclasses.replace(plan, names=names, admin=int(bool(plan.admin) and server.admin))
        if isinstance(sent, OwnPlan):
            own = OwnRunner(
                client, vocabulary=sent.vocabulary, rounds=times, requests=sent.requests, timeout_s=timeout_s
            )
            own.begin(served, names=secrets.randbelow(1 << 32))
            results.append(own.run(sent))
        else:
            assert known is not None, "a line of a model whose answers are known"
            is_first, alphabet = attempt == 0, Alphabet(known.parameters)
            live = LiveRunner(
                client, alphabet, timeout_s=timeout_s, is_replay=is_first, is_balanced=bool(server.metrics)
            )
            live.begin(served, names=secrets.randbelow(1 << 32))
            results.append(live.run(sent))
        if results[-1].is_over:
            break
    return _told(plan, results, is_forced=server.admin or not plan.admin)


def _model(folder: Path) -> KnownAnswers:
    if not folder.is_absolute() and not folder.exists():
        raise UsageError(
            f"the line names the model by known-answers={folder}, and here is no such folder; replay it in the "
            "folder where the run was started, or write the whole path into the line"
        )
    return known_answers(folder)


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
