"""Lifeline: the child that holds an engine ends with its parent, whatever its main thread is at.

Invariants:
- Loads nothing but the standard library: it is tied before anything that takes long to import.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def tie() -> None:
    """End this process and what it has started once nobody can write to its standard input any more.

    The process has to lead a group of its own: the whole group is killed.
    """
    poll = select.poll()
    poll.register(sys.stdin.fileno(), 0)  # what is still to be read does not count, its end does

    def watch() -> None:
        poll.poll()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
