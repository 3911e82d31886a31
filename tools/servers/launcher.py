"""The process above a server: it starts the server's command, and ends with whoever started it.

    python launcher.py PARENT COMMAND...

    PARENT: the process that started this one, and holds the other end of its standard input

Invariants:
- It leads the server's process group. When its parent ends, however that happens, the whole group is killed.
- It ends when the command ends, with its status: 128 + n where signal n ended it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from kvcheck.core.base.child_start import GROUP, tie_to


def main() -> int:
    parent, *command = sys.argv[1:]
    tie_to(int(parent), GROUP)
    # What stops the group reaches the command, too. A handler is not inherited by the command; to ignore would be.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    try:
        status = subprocess.Popen(command, stdin=subprocess.DEVNULL).wait()
    except OSError as error:
        sys.exit(f"{command[0]} cannot be started: {error.strerror or error}")
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
