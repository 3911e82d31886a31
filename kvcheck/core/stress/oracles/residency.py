"""The residency oracle: a lookup finds on each tier the pages that were added, by the oracle's own count.

    host set    {hash: id} by space, from additions and removals
    lookup      longest prefix of the request's hashes that the sets can serve = the pages that the cache found;
                it needs each of its pages, and a state at its end or the pages that its next position sees

Invariants:
- A hash leaves a tier with the id that it came with. An id stands for one hash at a time.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from kvcheck.core.cache.events import LookedUp, TierChanged
from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle, unit_text
from kvcheck.core.stress.workload.events import Modelled, Transferred

SPACES = ("full", "window", "state")


class ResidencyOracle(Oracle):
    name = "residency"

    def __init__(self) -> None:
        super().__init__()
        self._model = Modelled(page_size=1, window=0, has_state=False)
        self._held: dict[tuple[str, str], dict[bytes, int]] = {}
        self._by_id: dict[tuple[str, str], dict[int, bytes]] = {}

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return (
            (Modelled, self._modelled),
            (TierChanged, self._changed),
            (LookedUp, self._looked_up),
            (Transferred, self._transferred),
        )

    def _modelled(self, event: Modelled) -> None:
        self._model = event

    def _changed(self, event: TierChanged) -> None:
        place = (event.tier, event.space)
        held, by_id = self._held.setdefault(place, {}), self._by_id.setdefault(place, {})
        for each, unit in zip(event.chain, event.ids, strict=True):
            self.judged += 1
            if event.added:
                if unit in by_id:
                    self._add(event, "KV305", unit, "is handed to a second cached page while the first has it")
                held[each], by_id[unit] = unit, each
                continue
            if held.get(each) != unit:
                was = f"came under id {held[each]}" if each in held else "is not there"
                self._add(event, "KV303", unit, f"is given back for a cached prefix that {was}")
            by_id.pop(held.pop(each, unit), None)

    def _looked_up(self, event: LookedUp) -> None:
        self.judged += 1
        found = self._servable(event)
        on_device = _leading(event.chain, self._held.get(("device", "full"), {}), {})
        if event.pages != found:
            self._miscount(event, "pages", found, event.pages)
        elif event.device_pages != min(event.pages, on_device):
            self._miscount(event, "pages on the device", min(event.pages, on_device), event.device_pages)

    def _servable(self, event: LookedUp) -> int:
        tiers = ("device",) if event.device_only else ("device", "host")
        held = (
            {space for tier in tiers for space in SPACES if each in self._held.get((tier, space), ())}
            for each in event.chain
        )
        return longest_prefix(self._model, held)

    def _transferred(self, event: Transferred) -> None:
        self.judged += 1
        if not event.frozen:
            text = f"the index values of a {event.kind} for request {event.request} changed between its start and its"
            self.add("KV303", f"{text} acknowledgement; expected frozen values", tier="host", request=event.request)

    def _miscount(self, event: LookedUp, what: str, expected: int, got: int) -> None:
        text = f"request {event.request} was served {got} {what} by the prefix cache"
        self.add("KV301", f"{text}; what was added to the tiers serves {expected}", request=event.request)

    def _add(self, event: TierChanged, code: str, unit: int, story: str) -> None:
        self.add(code, f"{event.tier} {unit_text(event.space, unit)} {story}", tier=event.tier, page=unit)


def first_seen(model: Modelled, pages: int) -> int:
    return max(0, pages * model.page_size + 1 - model.window) // model.page_size


def longest_prefix(model: Modelled, held: Iterable[Container[str]]) -> int:
    """Pages of the longest complete prefix. held: for each page of the prompt, the spaces that have it."""
    longest, missing = 0, -1  # missing: the last page without its window page
    for page, spaces in enumerate(held):
        if "full" not in spaces:
            break
        missing = missing if "window" in spaces else page
        sees_all = not model.window or missing < first_seen(model, page + 1)
        serves = "state" in spaces if model.has_state else sees_all
        longest = page + 1 if serves else longest
    return longest


def _leading(chain: tuple[bytes, ...], first: dict[bytes, int], second: dict[bytes, int]) -> int:
    count = 0
    for each in chain:
        if each not in first and each not in second:
            break
        count += 1
    return count
