"""Python loads this module when a process starts, because `tools/servers/sglang_cpu.py` puts its folder on PYTHONPATH.

Invariants:
- Without KVCHECK_INSIDE it does nothing. It loads no part of an engine, and neither torch nor numpy.
- What cannot be put in ends the process: a server must not serve without what its record names.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

if os.environ.get("KVCHECK_INSIDE"):
    sys.path.append(str(Path(__file__).resolve().parents[4]))  # last: the engine's own packages are found before

    from tools.servers.inside.start import start

    try:
        start(os.environ)
    except Exception as error:  # Python would go on without this module
        sys.stderr.write(f"kvcheck cannot be put into this process: {type(error).__name__}: {error}\n")
        os._exit(70)
