"""The aliasing oracle: owned values share no storage with a pool, and index values are not changed in place."""

from __future__ import annotations

from collections.abc import Iterable

from kvcheck.core.stress.history import Handler
from kvcheck.core.stress.oracles.oracle import Oracle
from kvcheck.core.stress.workload.events import Aliased, Descriptor, Owned


class AliasingOracle(Oracle):
    name = "aliasing"

    def handlers(self) -> Iterable[tuple[type, Handler]]:
        return ((Aliased, self._aliased), (Owned, self._owned), (Descriptor, self._descriptor))

    def _owned(self, event: Owned) -> None:
        self.judged += 1

    def _aliased(self, event: Aliased) -> None:
        self.judged += 1
        where = "" if event.page is None else f" ({'slot' if 'metadata' in event.buffer else 'page'} {event.page})"
        self.add(
            "KV305",
            f"the {event.what} of request {event.request} shares its storage with {event.buffer}{where}, "
            "which will be reused; expected an owned copy",
            tier="device",
            buffer=event.buffer,
            page=event.page,
            request=event.request,
        )

    def _descriptor(self, event: Descriptor) -> None:
        self.judged += 1
        if not event.unchanged:
            text = f"{event.what} changed the page list of request {event.request} in place"
            self.add("KV303", text, request=event.request)
