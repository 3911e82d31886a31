"""Child process of `kvcheck stress --jobs`: reads orders from stdin, writes one JSON line a schedule.

Invariants:
- Errors end the process with the exit code of their kind; the parent reports the cells that were left.
- SIGTERM, with which the parent ends a run, unwinds the schedule under way: temporary folders do not outlive it.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

from kvcheck.commands.cells import work
from kvcheck.commands.terminal import complain
from kvcheck.core.errors import KvcheckError


def main() -> int:
    """Run the orders on stdin."""
    signal.signal(signal.SIGTERM, _end)
    try:
        for line in work(sys.stdin.read()):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    except KvcheckError as error:
        complain(str(error))
        return error.exit_code
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def _end(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: what unwinds must not be stopped half-way
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
