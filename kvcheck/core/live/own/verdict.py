"""Findings of a round's arms, reasons against a pass, and notes on its noise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvcheck.core.base.nouns import counted, plural
from kvcheck.core.base.record import Finding
from kvcheck.core.live.exchange import Answer, End, Exchange
from kvcheck.core.live.judge.answer import broken_off, was_aborted, wrong_set_up
from kvcheck.core.live.own.arms import ArmResult
from kvcheck.core.live.own.prompts import Crosstalk
from kvcheck.core.live.own.reference import Reference
from kvcheck.core.live.own.statistic import (
    LEAST_NATS,
    WIDE,
    Ground,
    Level,
    LogprobDeviation,
    ReportedDeviation,
    can_tell_many,
    is_wide,
    leading,
    leading_p,
    least_found,
)

ORACLE = "own-model"
CROSSTALK, DIVERGED, UNLIKE_REFERENCE = "KV809", "KV810", "KV811"
BROKEN_OFF, WRONG_LENGTH = "KV807", "KV808"
SHOWN = 8
"""Tokens of a run that a message shows."""


def crosstalk_finding(exchange: Exchange, found: Crosstalk, *, arm: str, chance: float) -> Finding:
    question = exchange.sending.question
    shown = " ".join(map(str, found.run[:SHOWN]))
    owners = f"{plural(len(found.owners), 'request')} {', '.join(map(str, found.owners))}"
    return Finding(
        code=CROSSTALK,
        oracle=ORACLE,
        request=question.number,
        seen_request=found.owners[0],
        message=(
            f"request {question.number} answered {counted(len(found.run), 'token')} from step {found.step} on "
            f"({shown}) that only {owners} can know; by chance at most {chance:.0e} of such runs have one"
        ),
        minimal={
            "requests": [question.number, *found.owners],
            "rid": exchange.sending.rid,
            "arm": arm,
            "step": found.step,
            "run": list(found.run),
            "prompt": len(question.ids),
            "answered": list(exchange.answer.tokens),
        },
    )


def diverged_finding(
    told: ReportedDeviation, value: LogprobDeviation, exchange: Exchange, reference: Answer, noise: float
) -> Finding:
    question, step = exchange.sending.question, value.step
    assert told.ground is not None
    p = "" if told.p is None else f" (p = {told.p:.1e})"
    return Finding(
        code=DIVERGED,
        oracle=ORACLE,
        request=question.number,
        message=(
            f"request {question.number} is {value.largest:.3g} nats from its cold reference at step {step}"
            f"{_flip_text(value, exchange.answer, reference)}; the largest of all controls is {noise:.3g} nats; "
            f"{told.ground.value}{p}"
        ),
        minimal={
            "requests": [question.number],
            "rid": exchange.sending.rid,
            "arm": "treated",
            "step": step,
            "flip": value.flip,
            "nats": value.largest,
            "noise": noise,
            "ground": told.ground.name.lower(),
            "p": told.p,
            "cached": exchange.answer.cached,
            "retractions": exchange.answer.retractions,
            "prompt": len(question.ids),
            "expected": list(reference.tokens[: value.tokens]),
            "answered": list(exchange.answer.tokens[: value.tokens]),
        },
    )


def _flip_text(value: LogprobDeviation, answer: Answer, reference: Answer) -> str:
    if value.flip is None:
        return ", with the same tokens"
    said, right = answer.tokens[value.flip], reference.tokens[value.flip]
    return f", and answers token {said} at step {value.flip} where the reference has {right}"


def unsteady_reason(told: ReportedDeviation, value: LogprobDeviation, unlike: str | None) -> str:
    """Describe a deviation that is no finding. unlike: why controls have other shapes than treated requests."""
    if told.ground is Ground.MANY:
        why = f"so were many others, less than {LEAST_NATS:g} nats or {WIDE:g} times the controls; {unlike}"
    elif told.ground is not None:
        why = "it is too near for the controls that were sent"
    elif told.nats > LEAST_NATS:
        why = "it did not come again, or its fresh copies deviate as well"
    else:
        why = f"no control differs at all, and less than {LEAST_NATS:g} nats is no finding"
    return (
        f"unsteady: request {told.request} was {told.nats:.3g} nats from its reference at step {value.step}, and {why}"
    )


def ends(
    exchanges: Iterable[Exchange], compared: Mapping[int, LogprobDeviation], references: Mapping[int, Answer]
) -> tuple[list[Finding], list[str]]:
    """Return broken answers (findings), and a reason for each way in which others could not be compared."""
    findings: list[Finding] = []
    kinds: dict[str, list[str]] = {}
    for each in exchanges:
        number = each.sending.question.number
        asked, came = len(each.sending.question.expected), len(each.answer.tokens)
        if (text := broken_off(each)) is not None:
            findings.append(_broken(BROKEN_OFF, each, text))
        elif came > asked:
            findings.append(_broken(WRONG_LENGTH, each, f"{came} tokens came where {asked} were asked for"))
        elif (text := wrong_set_up(each)) is not None:
            kinds.setdefault("read as other tokens", []).append(text)
        elif each.answer.end is not End.DONE and not was_aborted(each):
            kinds.setdefault(each.answer.end.value, []).append(each.answer.reason or each.answer.end.value)
        elif number not in compared:
            kinds.setdefault("nothing to compare", []).append(
                "it or its cold reference has no token with a log-probability"
            )
        elif not was_aborted(each) and compared[number].flip is None and came < len(references[number].tokens):
            kinds.setdefault("shorter", []).append(
                f"{came} tokens came where the cold reference has {len(references[number].tokens)}"
            )
    return findings, [
        f"not judged: {counted(len(texts), 'request')} ({end}), the first: {texts[0]}" for end, texts in kinds.items()
    ]


def _broken(code: str, each: Exchange, text: str) -> Finding:
    number = each.sending.question.number
    return Finding(
        code=code,
        oracle=ORACLE,
        request=number,
        message=f"request {number}: {text}",
        minimal={"requests": [number], "rid": each.sending.rid},
    )


def warm_references(arms: Iterable[ArmResult]) -> str | None:
    warm = [each for arm in arms for each in arm.exchanges if each.answer.cached]
    if not warm:
        return None
    return (
        f"the reference is not cold: {counted(len(warm), 'request')} with a salt of its own had cached tokens, the "
        f"first {warm[0].answer.cached}; the server, or a router before it, ignores cache_salt or extra_key: use a "
        "release that knows it"
    )


def noise_notes(
    cell: str, treated: Sequence[float], cold: Sequence[float], fresh: Sequence[float], *, more: int
) -> list[str]:
    """cold: controls without reuse; fresh: those that hit pages computed just before. more: further arms allowed."""
    least = least_found(len(treated), (*cold, *fresh), more=more)
    controls = f"{counted(len(cold) + len(fresh), 'control')} {_far(max((*cold, *fresh), default=0.0))}"
    notes = [
        f"{cell}: {counted(len(treated), 'treated answer')} {_far(max(treated, default=0.0))} the cold reference, "
        f"{controls} it; not looked for: one request less than {least:.3g} nats off"
    ]
    fresh_most, cold_most = max(fresh, default=0.0), max(cold, default=0.0)
    if fresh_most > WIDE * cold_most:
        notes.append(
            f"{cell}: answers that hit fresh pages are {fresh_most:.3g} nats off, cold ones {cold_most:.3g}; kernels "
            "of other shapes do this, and so would an error of every hit: a known-answer model tells them apart"
        )
    return notes


def group_note(cell: str, groups: int, level: Level) -> list[str]:
    if can_tell_many(groups, level):
        return []
    if not groups:
        return [
            f"{cell}: no treated request has a matched one that was answered and not retracted; not looked for: many "
            "small deviations (a smaller --concurrency retracts fewer)"
        ]
    return [
        f"{cell}: the requests fall into {counted(groups, 'group')} by the pages that they share; not looked for: many "
        "small deviations, which need more groups (--requests, --schedules)"
    ]


def _far(nats: float) -> str:
    return "equal bit for bit to" if nats == 0.0 else f"at most {nats:.3g} nats from"


def recital_note(cell: str, recited: int, asked: int) -> str:
    if recited:
        return f"{cell}: {recited} of {asked} cold answers recite the code that they were asked for"
    return (
        f"{cell}: this model recites no code ({asked} cold answers), so that crosstalk could show as a deviation only"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildComparison:
    """A comparison's result. message: of a finding. reason: why there is no verdict. request: the farthest."""

    code: str = UNLIKE_REFERENCE
    message: str | None = None
    reason: str | None = None
    request: int | None = None
    notes: tuple[str, ...] = ()
    minimal: Mapping[str, object] = field(default_factory=dict)

    def finding(self, *, oracle: str, scenario: str, shape: str) -> Finding:
        assert self.message is not None
        return Finding(
            code=self.code,
            oracle=oracle,
            scenario=scenario,
            shape=shape,
            request=self.request,
            message=self.message,
            minimal=dict(self.minimal),
        )


def compare_builds(
    kept: Reference, cold: ArmResult, again: ArmResult, *, is_whole: bool, rounds: int
) -> BuildComparison:
    """Compare answers of this build with the kept ones. rounds: of the run, this one included."""
    values = {number: value.largest for number, value in cold.values.items()}
    if not is_whole or len(values) < len(kept.kept) or len(again.values) < len(kept.kept):
        lacking = len(kept.kept) - min(len(values), len(again.values))
        return BuildComparison(
            reason=f"{lacking} of {len(kept.kept)} kept requests were not answered twice by this build"
        )
    if any(each.answer.cached for arm in (cold, again) for each in arm.exchanges):
        return BuildComparison(reason="answers of this build were not cold: it ignores cache_salt or extra_key")
    own = [abs(again.values[number].largest - value) for number, value in values.items()]
    noise = [*kept.again, *kept.control, *own]
    wide = {n: value for n, value in values.items() if is_wide(min(value, again.values[n].largest), noise)}
    # Only the kept build's own repeats are drawn as the values are.
    p = leading_p(leading(list(values.values()), noise), len(values), len(kept.again))
    request = max(values, key=lambda number: (values[number], -number))
    most = values[request]
    build = kept.version or "of unknown version"
    if not wide and p > Level(rounds=rounds).many:
        note = f"at most {most:.3g} nats from {kept.engine} {build}, noise of both builds {max(noise):.3g} nats"
        return BuildComparison(notes=(note,))
    value = cold.values[request]
    other = sum(each.flip is not None for each in cold.values.values())
    return BuildComparison(
        message=(
            f"{counted(len(wide), 'request')} of {len(values)} lie far from what {kept.engine} {build} answered, "
            f"{other} with other tokens; the farthest, request {request}, is {most:.3g} nats off at step {value.step}; "
            f"the noise of both builds is at most {max(noise):.3g} nats (p = {p:.1e})"
        ),
        request=request,
        minimal={
            "requests": [request, *sorted(n for n in wide if n != request)][:16],
            "step": value.step,
            "flip": value.flip,
            "nats": most,
            "noise": max(noise),
            "p": p,
            "reference": kept.digest,
        },
    )
