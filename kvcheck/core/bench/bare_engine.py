"""The plainest use of the transfer engine: calls of its library in a loop, timed in the same process.

Invariants:
- The loop has the library, the variables and the registered regions of the engine process.
- Only calls of the library lie between the two readings of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvcheck.core.base.errors import TransferError
from kvcheck.core.cache.transfer.mooncake.child import Library, main
from kvcheck.core.cache.transfer.mooncake.engine import MooncakeEngine, PeerInfo
from kvcheck.core.cache.transfer.mooncake.frames import Channel, ChannelClosed, Kind, pack_json, unpack_json
from kvcheck.core.cache.transfer.mooncake.plan import Batch

RUN_S = 120.0


class BareEngine(MooncakeEngine):
    """An engine process that takes a whole run of calls at once."""

    program = __name__

    def run(self, peer: PeerInfo, batches: Sequence[Batch]) -> float:
        """Seconds for all batches, one call each, one after the other, unchecked and unmerged."""
        calls = []
        for batch in batches:
            source, target, length = batch.blocks.T
            local, remote = self.regions()[batch.local][0], peer.regions[batch.remote][0]
            calls.append([(source + local).tolist(), (target + remote).tolist(), length.tolist()])
        asked = pack_json({"peer": peer.session, "calls": calls})
        deadline = time.monotonic() + RUN_S
        self._channel.send(Kind.START, 0, asked, deadline=deadline)
        answer = unpack_json(self._channel.receive(deadline=deadline).payload)
        if answer["code"] != 0:
            raise TransferError(f"the bare loop's library returned {answer['code']}, expected 0")
        return int(str(answer["elapsed_ns"])) / 1e9


def loop(channel: Channel, library: Library) -> None:
    """Answer each run with its return code and its time, until the process ends."""
    while True:
        asked = unpack_json(channel.receive().payload)
        peer, calls = str(asked["peer"]), asked["calls"]
        if not isinstance(calls, list):
            raise ChannelClosed(f"expected a list of calls, got {calls!r}")
        code = 0
        start = time.perf_counter_ns()
        for local, remote, length in calls:
            code = library.batch_transfer_sync_write(peer, local, remote, length)
            if code != 0:
                break
        elapsed = time.perf_counter_ns() - start
        channel.send(Kind.READY, 0, pack_json({"code": code, "elapsed_ns": elapsed}))


if __name__ == "__main__":
    main(loop)
