"""Delays of a device as part of a plan: as the text of a line, and by the number of a schedule.

    3.hicache.load~17.decode.read   the lane of the 3rd hicache.load is held until the 17th decode.read has run
    hicache.load/storage.put        the lanes of all operations of these names are held until the process waits
    h2d                             the lanes of that group are held until the process waits

Text and value round-trip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvcheck.core.base.errors import UsageError
from kvcheck.core.cache.backend.delays import Delay, DelaySite
from kvcheck.core.run.plan import Plan
from kvcheck.core.stress.strategies import LANE_GROUPS, delayed_groups

MAX_DELAYS = 16

_SITE = re.compile(r"(?:([1-9][0-9]{0,11})\.)?([A-Za-z_][^~/]{0,79})")


def delays_of(plan: Plan) -> tuple[Delay, ...]:
    if not plan.is_delayed:
        return ()
    if plan.choices is not None:
        return parse_delays(plan.choices)
    return tuple(Delay(held=DelaySite(lanes=LANE_GROUPS[group])) for group in delayed_groups(plan.schedule))


def parse_delays(text: str) -> tuple[Delay, ...]:
    """Parse the text of a line. Raises UsageError."""
    rows = text.split("/")
    if len(rows) > MAX_DELAYS:
        raise UsageError(f"strategy=delay: expected at most {MAX_DELAYS} delays, got {len(rows)}")
    return tuple(_parse_delay(row) for row in rows)


def delays_text(delays: Sequence[Delay]) -> str:
    return "/".join("~".join(_site_text(site) for site in (each.held, each.until) if site) for each in delays)


def _parse_delay(text: str) -> Delay:
    held, tilde, until = text.partition("~")
    return Delay(held=_parse_site(held), until=_parse_site(until) if tilde else None)


def _parse_site(text: str) -> DelaySite:
    found = _SITE.fullmatch(text)
    if found is None or (found[2] in LANE_GROUPS and found[1]):
        raise UsageError(
            "strategy=delay: expected choices=[NUMBER.]OPERATION[~[NUMBER.]OPERATION], or a group of lanes "
            f"({', '.join(LANE_GROUPS)}); got {text[:80]!r}"
        )
    if found[2] in LANE_GROUPS:
        return DelaySite(lanes=LANE_GROUPS[found[2]])
    return DelaySite(operation=found[2], nth=int(found[1]) if found[1] else None)


def _site_text(site: DelaySite) -> str:
    if site.operation is None:
        return next(group for group, starts in LANE_GROUPS.items() if starts == site.lanes)
    return site.operation if site.nth is None else f"{site.nth}.{site.operation}"
