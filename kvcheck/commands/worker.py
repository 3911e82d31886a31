"""Child process of `kvcheck stress --jobs`: reads orders from stdin, writes one JSON line a schedule.

Invariants:
- Errors end the process with the exit code of their kind; the parent reports the cells that were left.
"""

from __future__ import annotations

import sys

from kvcheck.commands.cells import work
from kvcheck.commands.terminal import complain
from kvcheck.core.errors import KvcheckError


def main() -> int:
    """Run the orders on stdin."""
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


if __name__ == "__main__":
    sys.exit(main())
