"""Which pages of a request came from the host, by literal lookups."""

from __future__ import annotations

from kvcheck.core.cache.events import Event, LookedUp
from kvcheck.core.stress.workload.events import Forward
from kvcheck.core.stress.workload.host_inspector import HostHits


def lookup(request: int, *, device: int, pages: int) -> LookedUp:
    return LookedUp(request, (b"a", b"b", b"c"), pages, device, False, 0)


def test_what_lies_behind_the_device_s_pages_was_loaded() -> None:
    heard: list[Event] = []
    hits = HostHits(heard.append)
    told = [lookup(1, device=1, pages=3), lookup(2, device=2, pages=2), Forward(1, 24, 30)]
    for event in told:
        hits(event)
    assert heard == told
    assert (hits.pages(1, 3), hits.pages(2, 2), hits.pages(3, 0)) == (range(1, 3), range(2, 2), range(0))


def test_the_last_lookup_counts_and_only_where_the_request_began_behind_it() -> None:
    hits = HostHits(lambda event: None)
    hits(lookup(1, device=0, pages=3))
    hits(lookup(1, device=1, pages=2))
    assert hits.pages(1, 2) == range(1, 2)
    assert hits.pages(1, 0) == range(0), "computed anew: nothing was loaded"
    assert hits.pages(1, 3) == range(0), "what the first lookup found was given up"
