"""The process of one rank: it builds the rank, meets its peers, runs rounds until all is done, and reports.

    spec -> memory -> links to all peers -> layouts checked -> engine -> rounds: poll, agree, settle -> idle -> closed

Invariants:
- The product code is that of a run in one process, except the wire and the group of ranks.
- A lost peer ends its own rooms. A lost rank of this end ends every request, because the ranks cannot agree.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable

import torch

from kvcheck.core.base.cells import PROCESS_TRANSPORTS
from kvcheck.core.base.errors import KvcheckError, TransferError, UnknownVerdict, UsageError, machine_trouble
from kvcheck.core.base.record import value_from
from kvcheck.core.cache.scheduler.process_group import GroupLost
from kvcheck.core.cache.transfer import TRANSPORTS
from kvcheck.core.cache.transfer.sockets.wire import ProcessWire
from kvcheck.core.run.plan import parse_line
from kvcheck.core.stress.ranks.child import Inbox
from kvcheck.core.stress.ranks.rank import RankRun
from kvcheck.core.stress.ranks.spec import RankSpec
from kvcheck.core.stress.targets.target import FIXED, TargetParts

Say = Callable[[str, dict[str, object]], None]
Choose = Callable[[RankSpec], type[ProcessWire]]


def wire_of(spec: RankSpec) -> type[ProcessWire]:
    transport = parse_line(spec.line).transport
    kind = TRANSPORTS.load(transport)
    if not issubclass(kind, ProcessWire):
        raise UsageError(f"transport {transport} joins ranks of one process; expected one of {PROCESS_TRANSPORTS}")
    return kind


def main(choose: Choose = wire_of, make: Callable[[RankSpec], TargetParts] = lambda spec: FIXED) -> int:
    torch.set_num_threads(1)
    first = sys.stdin.readline()
    inbox = Inbox()
    threading.Thread(target=_listen, args=(inbox,), name="supervisor", daemon=True).start()
    lock = threading.Lock()

    def say(event: str, values: dict[str, object]) -> None:
        text = json.dumps({"event": event, **values})
        with lock:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    spec: RankSpec | None = None
    try:
        spec = value_from(RankSpec, json.loads(first), "spec")
        run = RankRun(spec, choose(spec), say, inbox, parts=make(spec))
        _meet(run)
        run.run_rounds()
        run.answer_until_over()
        run.close()
        threading.Event().wait()  # links stay up until all ranks are done; then the supervisor ends this process
    except (KvcheckError, GroupLost, ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        trouble = machine_trouble(error)
        if trouble is None and not isinstance(error, KvcheckError | GroupLost | ValueError):
            raise
        exit_code = error.exit_code if isinstance(error, KvcheckError) else 1
        if trouble is not None:
            exit_code = UnknownVerdict.exit_code
        message = f"{spec.name}: {trouble}" if trouble is not None and spec is not None else str(error)
        say("error", {"kind": type(error).__name__, "message": message, "exit_code": exit_code})
        return exit_code
    return 0


def _meet(run: RankRun) -> None:
    """Raises UnknownVerdict if a rank is missing: nothing is under test before all ranks have met."""
    try:
        run.meet()
    except (GroupLost, TransferError) as error:
        raise UnknownVerdict(f"{run.rank.name} has not met its peers: {error}") from error


def _listen(inbox: Inbox) -> None:
    for line in sys.stdin:
        inbox.take(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
