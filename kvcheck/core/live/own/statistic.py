"""Decides whether treated answers lie further from the reference than the server's own noise.

One number a request: its deviation. Noise comes from controls that read no page with a history:

    again     the reference once more: noise from run to run
    control   the same load without sharing: noise of batches
    matched   the same load, each prefix computed just before its hit, as far as the treated request hit it; of a
              retracted request, its answer is cut and computed anew: noise of the very shapes

A warm request runs other kernel shapes than a cold one: without a fault it may deviate by 0.1 nat. So a difference from
the reference alone is no finding. There are two tests: many requests deviate (`_many`), or one does (`is_wide`,
`Repeats`, `is_too_near`).

All levels of a run sum to ALPHA: half for the first test over all rounds, half for the second over all suspects.

Invariants:
- Exact zeros and ties are no finding.
- Less noise never turns a finding into a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kvcheck.core.live.exchange import Answer

_FLOAT32 = 2.0**-24
ALPHA = 1.0 / 200.0
"""Largest share of runs without a fault that may end in a finding."""
WIDE = 5.0
LEAST_NATS = 0.5
MOST_SUSPECTS = 8
MORE_CONTROLS = 24
"""Most further control arms for a finding about one request that is too near."""
MARGIN = 5.0
REPEATS = 12
"""Repeats of a suspect, and of its fresh copies."""
GIVE_UP = 3
"""First repeats of a suspect, one of which has to be wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobDeviation:
    """largest: nats; 0.0: equal bit for bit. step: of the largest. flip: the first step with another token."""

    largest: float
    step: int
    flip: int | None
    tokens: int

    @property
    def is_none(self) -> bool:
        return self.largest == 0.0 and self.flip is None


def deviation(reference: Answer, answer: Answer, *, most: int | None = None) -> LogprobDeviation | None:
    """The largest difference; None without log-probabilities. most: steps to compare."""
    if reference.logprobs is None or answer.logprobs is None:
        return None
    count = min(len(reference.tokens), len(answer.tokens), most if most is not None else len(answer.tokens))
    if not count:
        return None
    flip = next((step for step in range(count) if reference.tokens[step] != answer.tokens[step]), None)
    compared = count if flip is None else flip + 1
    differences = [_difference(_row(reference, step), _row(answer, step)) for step in range(compared)]
    largest = max(differences)
    return LogprobDeviation(largest=largest, step=differences.index(largest), flip=flip, tokens=compared)


@dataclass(frozen=True, slots=True)
class _StepRow:
    token: int
    logprob: float
    top: Mapping[int, float]
    is_listed: bool


def _row(answer: Answer, step: int) -> _StepRow:
    assert answer.logprobs is not None
    token, value = answer.tokens[step], answer.logprobs[step]
    listed = answer.top[step] if answer.top is not None else {}
    return _StepRow(token, value, {**listed, token: value}, len(listed) > 1)


def _difference(one: _StepRow, two: _StepRow) -> float:
    largest = max((abs(one.top[token] - two.top[token]) for token in one.top.keys() & two.top.keys()), default=0.0)
    return max(largest, _lacking(one, two), _lacking(two, one))


def _lacking(one: _StepRow, two: _StepRow) -> float:
    if one.token in two.top:
        return 0.0
    most = min(two.top.values()) if two.is_listed else min(two.logprob, _rest(two.logprob))
    return max(0.0, one.logprob - most)


def _rest(logprob: float) -> float:
    """The largest log-probability of all other tokens together; float32 rounds values nearer to 1."""
    return math.log(max(-math.expm1(min(logprob, 0.0)), _FLOAT32))


class Ground(Enum):
    """Why a deviation is reported, in the words of records."""

    AGAIN = "it came again, and not in fresh copies"
    EXACT = "each control is equal to the reference bit for bit"
    MANY = "the largest deviations are all of treated requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Significance levels of a run with this number of rounds."""

    rounds: int

    @property
    def many(self) -> float:
        return ALPHA / 2 / max(1, self.rounds)

    @property
    def again(self) -> float:
        return ALPHA / 2 / (max(1, self.rounds) * MOST_SUSPECTS)


@dataclass(frozen=True, slots=True)
class Repeats:
    warm: tuple[float, ...]
    fresh: tuple[float, ...]

    @property
    def p(self) -> float:
        return leading_p(leading(self.warm, self.fresh), len(self.warm), len(self.fresh))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The deviations of a run so far. treated: by request, of the judged round.

    again, control, matched: of all rounds. earlier, earlier_matched: of earlier rounds of this scenario, by group.
    now_matched: of this round. groups: request -> group, if it shares pages. repeats: of suspects of this round.
    is_alike: whether matched requests have the shapes of treated ones, in all of these rounds.
    """

    treated: Mapping[int, float]
    again: Sequence[float] = ()
    control: Sequence[float] = ()
    matched: Sequence[float] = ()
    now_matched: Mapping[int, float] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    earlier: Sequence[float] = ()
    earlier_matched: Sequence[float] = ()
    repeats: Mapping[int, Repeats] = field(default_factory=dict)
    is_alike: bool = True

    @property
    def controls(self) -> tuple[float, ...]:
        fresh = (value for repeats in self.repeats.values() for value in repeats.fresh)
        return (*self.again, *self.control, *self.matched, *fresh)

    def grouped(self) -> tuple[list[float], list[float]]:
        """The largest deviation of each group of this round, of treated requests and of matched ones."""
        treated: dict[int, float] = {}
        matched: dict[int, float] = {}
        for request in self.treated.keys() & self.now_matched.keys():
            group = self.groups.get(request, request)
            treated[group] = max(treated.get(group, 0.0), self.treated[request])
            matched[group] = max(matched.get(group, 0.0), self.now_matched[request])
        return [*treated.values()], [*matched.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedDeviation:
    """A reported deviation. p: of its test. is_finding: False: unsteady."""

    request: int
    nats: float
    ground: Ground | None
    p: float | None = None
    is_finding: bool = True


# One request deviates: no test of ranks finds one in 50, since the largest of all is a treated one in half of all runs.
# Repeating it warm reads the same page, and a page that was written in an unusual batch deviates each time. So a
# finding needs four things. It is wide: beyond WIDE times each control and LEAST_NATS, since rounding alone moved
# answers by up to 0.17 nats, and controls may be 0. It recurs: of alternate repeats and fresh copies (same length, same
# hit, own pages) the largest deviations are all its own, at a level divided by MOST_SUSPECTS. It is among the first
# MOST_SUSPECTS of its round. And it is not too near.
def is_wide(value: float, controls: Sequence[float]) -> bool:
    return value > LEAST_NATS and value > WIDE * max(controls, default=0.0)


def least_found(treated: int, controls: Sequence[float], *, more: int = MORE_CONTROLS) -> float:
    """The smallest deviation of one request that would have been a finding. more: further control arms allowed."""
    most = max(controls, default=0.0)
    count = max(1, len(controls) + more * treated)
    distance = math.sqrt(MARGIN * treated / ALPHA / count)
    return max(LEAST_NATS, WIDE * most, distance * max(most, LEAST_NATS / WIDE))


def needs_more(told: Sequence[ReportedDeviation], measured: Measured) -> bool:
    accused = [each for each in told if each.is_finding]
    return bool(accused) and all(is_too_near(each, measured) for each in accused)


def settled(told: Sequence[ReportedDeviation], measured: Measured) -> list[ReportedDeviation]:
    """Turn findings that are too near into unsteady ones. A damaged page moves several answers, some of them a little,
    which do not weaken the others."""
    left = [replace(each, is_finding=False) if is_too_near(each, measured) else each for each in told]
    return sorted(left, key=lambda each: not each.is_finding)


def is_too_near(told: ReportedDeviation, measured: Measured) -> bool:
    """Whether a finding rests on one request, with too few controls for its distance."""
    # Noise with the heavy tail of a Pareto distribution of index 2 puts one of n treated requests r times beyond N
    # controls in about n of N r^2 runs. N r^2 has to be MARGIN n / ALPHA at least, since the largest of several counts.
    controls = measured.controls
    noise = max(LEAST_NATS / WIDE, max(controls, default=0.0))
    enough = MARGIN * len(measured.treated) / ALPHA
    return is_of_one(told) and told.is_finding and len(controls) * (told.nats / noise) ** 2 < enough


def is_of_one(told: ReportedDeviation) -> bool:
    return told.ground in (Ground.AGAIN, Ground.EXACT)


def leading(treated: Sequence[float], controls: Sequence[float]) -> int:
    most = max(controls, default=math.inf)
    return sum(value > most for value in treated)


def leading_p(k: int, treated: int, controls: int) -> float:
    """Probability that at least k treated values lie above each control, if all orders are equally likely."""
    if k == 0 or not controls:
        return 1.0
    return math.comb(treated + controls - k, controls) / math.comb(treated + controls, controls)


def paired_p(k: int) -> float:
    """Largest probability that the k largest deviations are all of treated requests, if each pair is symmetric."""
    return 0.5**k


def can_tell_many(groups: int, level: Level) -> bool:
    return paired_p(groups) <= level.many


def judge(measured: Measured, level: Level) -> list[ReportedDeviation]:
    """Report the deviations of a round beyond the noise, findings first."""
    controls = measured.controls
    # If each control equals the reference bit for bit, only a fault makes an answer wide, so it need not recur.
    is_exact = len(controls) >= len(measured.treated) and bool(controls) and max(controls) == 0.0
    told = []
    for request, value in sorted(measured.treated.items(), key=lambda row: (-row[1], row[0])):
        repeats = measured.repeats.get(request)
        if is_wide(value, controls):
            if repeats is not None and repeats.p <= level.again:
                told.append(ReportedDeviation(request=request, nats=value, ground=Ground.AGAIN, p=repeats.p))
            elif is_exact:
                told.append(ReportedDeviation(request=request, nats=value, ground=Ground.EXACT))
            else:
                p = None if repeats is None else repeats.p
                told.append(ReportedDeviation(request=request, nats=value, ground=None, p=p, is_finding=False))
        elif is_exact and value > 0.0:
            told.append(ReportedDeviation(request=request, nats=value, ground=None, is_finding=False))
    if not any(each.is_finding for each in told):
        told = [*_many(measured, level), *told]
    return sorted(told, key=lambda each: not each.is_finding)


# A treated request and its matched one have the same shape, so without a fault each is as likely as the other to be the
# further one, whatever the distribution; the k largest of all are then treated in at most 1 of 2^k cases. No size has
# to be chosen, and ties count against a finding.
#
# Treated requests that read the same pages share the noise of one page: they are one group, and so are their matched
# ones, which have pages of their own. The largest of each counts. Shared noise makes the largest of a group smaller,
# never larger, than noise of pages of their own (Sidak 1967), so this errs on the side of no finding.
#
# If the shapes differ (more treated requests at a time than the pool holds of controls, or unreported hits), other
# kernels can put many treated requests a little further off: then only wide ones count, and others are unsteady.
def _many(measured: Measured, level: Level) -> list[ReportedDeviation]:
    """The request with the largest deviation, if too many treated ones lie above each matched one."""
    now, now_matched = measured.grouped()
    treated, matched = [*measured.earlier, *now], [*measured.earlier_matched, *now_matched]
    p = paired_p(leading(treated, matched))
    if not now or p > level.many:
        return []
    wide = paired_p(sum(is_wide(value, measured.controls) for value in treated))
    request, value = max(measured.treated.items(), key=lambda row: (row[1], -row[0]))
    is_finding = measured.is_alike or wide <= level.many
    return [ReportedDeviation(request=request, nats=value, ground=Ground.MANY, p=p, is_finding=is_finding)]
