"""Decides whether treated answers lie further from the reference than the server's own noise.

One number a request: its deviation. Noise comes from controls that read no page with a history:

    again     the reference asked once more: noise from run to run
    control   the same load, and nothing is shared: noise of batches
    matched   the same load, and each prefix is computed anew just before it is hit, as far as the treated request hit
              it; of a request that was retracted, its answer is cut and computed anew: noise of the very shapes

A cold reference alone is no control. A warm request runs other kernel shapes than a cold one, and a server without a
fault may answer 0.1 nat apart. So nothing is a finding because it differs from the reference. There are two tests.

Many requests deviate (`paired_p`). A treated request and its matched one have the same shape, so without a fault each
of the two is as likely as the other to be the further one, whatever the distribution, and whatever other requests are
like. That the k largest of all are treated then happens in at most 1 of 2^k cases. No size has to be chosen, and ties
count against a finding. A request without a matched one does not count. Treated requests that read the same pages have
the noise of one page together: they are one *group*, and so are their matched ones, which have pages of their own. The
largest of each counts. Noise that is shared makes the largest of a group smaller, never larger, than noise of pages of
their own (Sidak 1967), so this errs on the side of no finding. Treated requests that were retracted are compared with
matched ones that were cut. Where the shapes are not the same (more treated requests run at a time than the pool holds
of controls, or the engine does not say what a request hit), other kernels can put many treated requests a little
further off. Then only those that are wide count, and others are unsteady.

One request deviates. No test of ranks finds one in 50: the largest of all is a treated one in half of all runs. And to
ask it again warm reads the same page: a page that was written in an unusual batch deviates each time, without a fault.
So four things are needed. It is *wide*: further than WIDE times each control of the run, and than LEAST_NATS, since
rounding alone moved answers by 0.17 nats at most in the threads that measured it, and nothing bounds a ratio where the
controls are 0. It comes again: asked in turns with fresh copies of itself (same length, same hit, own pages), the
largest deviations are all its own (`leading_p`: all orders of one request's answers are equally likely), at a level
that is divided by MOST_SUSPECTS. It is among the first MOST_SUSPECTS of its round. And there are enough controls for
its distance: noise with the heavy tail of a Pareto distribution of index 2 puts one of n treated requests r times
beyond N controls in about n of N r^2 runs. N r^2 has to be MARGIN n / ALPHA at least, since the largest of several is
looked at. Where none is so far, the control arm is sent again, at most MORE_CONTROLS times, and each that is still too
near is unsteady. A page that holds the wrong tokens is far beyond that; a small error of one page is not found, and no
verdict claims that it was looked for.

Where each control is equal to the reference bit for bit, nothing but a fault makes an answer wide: it then counts
without coming again. Below LEAST_NATS such a difference is unsteady, as is one that is wide and does not come again:
UNKNOWN, with its request.

All levels of a run add up to ALPHA: half for the first test over all its rounds, half for the second over all suspects
that its rounds may have.

Invariants:
- A pure function of numbers. Exact zeros and ties raise no alarm.
- Less noise never turns a finding into a pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

ALPHA = 1.0 / 200.0
"""Most runs between equal servers that may end in a finding."""
WIDE = 5.0
LEAST_NATS = 0.5
MOST_SUSPECTS = 8
MORE_CONTROLS = 24
"""Further control arms before one request is accused, where it is not far enough off for those that there are."""
MARGIN = 5.0
REPEATS = 12
"""How often a suspect is asked again, and as often a fresh copy of it."""
GIVE_UP = 3
"""A suspect that is not wide in any of its first repeats does not come again."""


class Ground(Enum):
    """Why a deviation is told; the values are those of records."""

    AGAIN = "it came again, and not in fresh copies"
    EXACT = "each control is equal to the reference bit for bit"
    MANY = "the largest deviations are all of treated requests"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """The probabilities at which a run of so many rounds accuses."""

    rounds: int

    @property
    def many(self) -> float:
        """Of the first test, for one look."""
        return ALPHA / 2 / max(1, self.rounds)

    @property
    def again(self) -> float:
        """Of the second, for one suspect."""
        return ALPHA / 2 / (max(1, self.rounds) * MOST_SUSPECTS)


@dataclass(frozen=True, slots=True)
class Repeats:
    """Deviations of a suspect that was asked again, and of fresh copies, in turns."""

    warm: tuple[float, ...]
    fresh: tuple[float, ...]

    @property
    def p(self) -> float:
        """How often the largest of both are so often warm ones, without a fault."""
        return leading_p(leading(self.warm, self.fresh), len(self.warm), len(self.fresh))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The deviations of a run so far. treated: by request, of the round that is judged.

    again, control, matched: of all rounds; control also has the arms that were sent more. earlier, earlier_matched: of
    the rounds of this scenario before, by group. now_matched: of this round, by request. groups: of this round, the
    group of a request, where it read pages that another one read too; others are groups by themselves. repeats: of
    suspects of this round. is_alike: whether matched requests have the shapes of treated ones, in all of these rounds.
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
        """All controls of the run, and the fresh copies of suspects."""
        fresh = (value for repeats in self.repeats.values() for value in repeats.fresh)
        return (*self.again, *self.control, *self.matched, *fresh)

    def grouped(self) -> tuple[list[float], list[float]]:
        """The largest deviation of each group of this round, of treated requests and of their matched ones."""
        treated: dict[int, float] = {}
        matched: dict[int, float] = {}
        for request in self.treated.keys() & self.now_matched.keys():
            group = self.groups.get(request, request)
            treated[group] = max(treated.get(group, 0.0), self.treated[request])
            matched[group] = max(matched.get(group, 0.0), self.now_matched[request])
        return [*treated.values()], [*matched.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A deviation that is told. p: of its test; None where it needs none. is_finding: False: unsteady."""

    request: int
    nats: float
    ground: Ground | None
    p: float | None = None
    is_finding: bool = True


def is_wide(value: float, controls: Sequence[float]) -> bool:
    """Whether no noise that was seen comes near it."""
    return value > LEAST_NATS and value > WIDE * max(controls, default=0.0)


def least_found(treated: int, controls: Sequence[float], *, more: int = MORE_CONTROLS) -> float:
    """Nats from which on one of so many requests would have been told, with all further controls alike. more: how often
    the control arm could still have been sent."""
    most = max(controls, default=0.0)
    count = max(1, len(controls) + more * treated)
    distance = math.sqrt(MARGIN * treated / ALPHA / count)
    return max(LEAST_NATS, WIDE * most, distance * max(most, LEAST_NATS / WIDE))


def needs_more(told: Sequence[Told], measured: Measured) -> bool:
    """Whether all who would be accused are too near for the controls that there are."""
    accused = [each for each in told if each.is_finding]
    return bool(accused) and all(is_too_near(each, measured) for each in accused)


def settled(told: Sequence[Told], measured: Measured) -> list[Told]:
    """What is left of accusations where no further control is sent: what is too near is unsteady, each by itself. One
    page that is damaged moves several answers, some of them a little; those take nothing back of the others."""
    left = [replace(each, is_finding=False) if is_too_near(each, measured) else each for each in told]
    return sorted(left, key=lambda each: not each.is_finding)


def is_too_near(told: Told, measured: Measured) -> bool:
    """Whether one request is accused by itself, and there are too few controls for its distance from them."""
    controls = measured.controls
    noise = max(LEAST_NATS / WIDE, max(controls, default=0.0))
    enough = MARGIN * len(measured.treated) / ALPHA
    return is_of_one(told) and told.is_finding and len(controls) * (told.nats / noise) ** 2 < enough


def is_of_one(told: Told) -> bool:
    """Whether it accuses one request by itself."""
    return told.ground in (Ground.AGAIN, Ground.EXACT)


def leading(treated: Sequence[float], controls: Sequence[float]) -> int:
    """How many treated values lie above each control."""
    most = max(controls, default=math.inf)
    return sum(value > most for value in treated)


def leading_p(k: int, treated: int, controls: int) -> float:
    """The probability that at least k treated values lie above each control, where all orders are equally likely."""
    if k == 0 or not controls:
        return 1.0
    return math.comb(treated + controls - k, controls) / math.comb(treated + controls, controls)


def paired_p(k: int) -> float:
    """At most how often the k largest deviations are all of treated requests, where each of a treated request and its
    matched one is as likely to be the further one."""
    return 0.5**k


def can_tell_many(groups: int, level: Level) -> bool:
    """Whether so many groups of requests could be a finding, if all of them deviated a little."""
    return paired_p(groups) <= level.many


def judge(measured: Measured, level: Level) -> list[Told]:
    """What the deviations of a round say; nothing where they lie within the noise. Findings come first."""
    controls = measured.controls
    is_exact = len(controls) >= len(measured.treated) and bool(controls) and max(controls) == 0.0
    told = []
    for request, value in sorted(measured.treated.items(), key=lambda row: (-row[1], row[0])):
        repeats = measured.repeats.get(request)
        if is_wide(value, controls):
            if repeats is not None and repeats.p <= level.again:
                told.append(Told(request=request, nats=value, ground=Ground.AGAIN, p=repeats.p))
            elif is_exact:
                told.append(Told(request=request, nats=value, ground=Ground.EXACT))
            else:
                p = None if repeats is None else repeats.p
                told.append(Told(request=request, nats=value, ground=None, p=p, is_finding=False))
        elif is_exact and value > 0.0:
            told.append(Told(request=request, nats=value, ground=None, is_finding=False))
    if not any(each.is_finding for each in told):
        told = [*_many(measured, level), *told]
    return sorted(told, key=lambda each: not each.is_finding)


def _many(measured: Measured, level: Level) -> list[Told]:
    """The request with the largest deviation, where too many treated ones lie above each matched one."""
    now, now_matched = measured.grouped()
    treated, matched = [*measured.earlier, *now], [*measured.earlier_matched, *now_matched]
    p = paired_p(leading(treated, matched))
    if not now or p > level.many:
        return []
    wide = paired_p(sum(is_wide(value, measured.controls) for value in treated))
    request, value = max(measured.treated.items(), key=lambda row: (row[1], -row[0]))
    is_finding = measured.is_alike or wide <= level.many
    return [Told(request=request, nats=value, ground=Ground.MANY, p=p, is_finding=is_finding)]
