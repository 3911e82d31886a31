"""Compares a build with the build of a kept reference.

The two tests are those of `statistic`. A wide answer that recurs cold is the build's own: no page of another request is
involved.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvcheck.core.base.nouns import counted
from kvcheck.core.base.record import Finding
from kvcheck.core.live.own.arms import Arm
from kvcheck.core.live.own.reference import Reference
from kvcheck.core.live.own.statistic import Level, is_wide, leading, leading_p
from kvcheck.core.live.own.verdict import UNLIKE_REFERENCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
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


def compare_builds(kept: Reference, cold: Arm, again: Arm, *, is_whole: bool, rounds: int) -> Comparison:
    """Compare answers of this build with the kept ones. rounds: of the run, this one included."""
    values = {number: value.largest for number, value in cold.values.items()}
    if not is_whole or len(values) < len(kept.kept) or len(again.values) < len(kept.kept):
        lacking = len(kept.kept) - min(len(values), len(again.values))
        return Comparison(reason=f"{lacking} of {len(kept.kept)} kept requests were not answered twice by this build")
    if any(each.answer.cached for arm in (cold, again) for each in arm.exchanges):
        return Comparison(reason="answers of this build were not cold: it ignores cache_salt or extra_key")
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
        return Comparison(notes=(note,))
    value = cold.values[request]
    other = sum(each.flip is not None for each in cold.values.values())
    return Comparison(
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
